"""Losses that layers add are in every trace of a step."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.strategies import make_strategy

WIDTH = 6
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")


class Reused(set):
    """The ids of objects that are gone, all of which other objects have."""

    is_left = True

    def __contains__(self, item):
        return self.is_left or super().__contains__(item)

    def clear(self):
        self.is_left = False
        super().clear()


class Leaving(keras.callbacks.Callback):
    """Leaves ids in all layers, before the steps are traced."""

    def on_train_begin(self, logs=None):
        for layer in self.model.layers:
            vars(layer)["_loss_ids"] = Reused()

    on_test_begin = on_train_begin


def compiled():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((WIDTH,))
    for _ in range(3):
        x = layers.Dense(WIDTH, "tanh", activity_regularizer="l2")(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("strategy", ["mirrored1", "mirrored2", "sharded2"])
@pytest.mark.parametrize("rows", [8, 5])
def test_ids_that_earlier_traces_left_drop_no_loss(strategy, rows):
    found = []
    for callbacks in ([], [Leaving()]):
        with make_strategy(strategy).scope():
            model = compiled()
        x, given = X[:rows], {"callbacks": callbacks, "verbose": 0}
        history = model.fit(x, x, batch_size=rows, epochs=2, **given).history
        found.append([*history["loss"], model.evaluate(x, x, **given)])
    assert found[0] == found[1]
