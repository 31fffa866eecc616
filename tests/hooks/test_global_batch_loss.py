"""Losses that are functions of the batch, wherever a model has them.

Each trains to one device's weights on several replicas, and a warning says
why it runs over the global batch. `tests/passes/row_kinds` has the rules.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.passes.row_kinds.losses import LOSSES, rows_of
from tests.support.combinations import combine
from tests.support.loss_places import (
    BATCH,
    FEATURES,
    PLACES,
    WORDS,
    Steps,
    X,
    Y,
    check,
    net,
)
from tests.support.plain_keras import mirrored


@pytest.mark.parametrize(
    ("name", "place"), combine(["root_of_mean", "balanced"], PLACES, every=3)
)
def test_each_place_of_a_loss(name, place):
    check(LOSSES[name], place, 3)


def spread_of(p):
    return ops.mean(ops.std(p, axis=0))


OF_LOSSES = {
    "root": lambda loss, p: ops.sqrt(loss),
    "times_rows": lambda loss, p: loss * rows_of(p),
    "over_log": lambda loss, p: loss / np.log(rows_of(p)),
    "plus_spread": lambda loss, p: loss + spread_of(p),
}


@pytest.mark.parametrize("name", combine(OF_LOSSES, every=4))
def test_what_a_train_step_makes_of_a_loss(name):
    class Makes(Steps):
        def loss_of(self, x, y, y_pred):
            loss = keras.losses.MeanSquaredError()(y, y_pred)
            return OF_LOSSES[name](loss, y_pred)

    found = []
    for strategy in (ks.OneDeviceStrategy("CPU:0"), mirrored(3)):
        with strategy.scope():
            model = Makes(None)
            model.compile(keras.optimizers.SGD(0.02))
            model(X[:BATCH])
        options = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(X, Y, epochs=2, **options).history
        found.append([*model.get_weights(), history["own"]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
    assert len([w for w in caught if WORDS in str(w.message)]) == 1


class Shares(keras.layers.Layer):
    """Adds weights' sum, divided by the number of rows."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        loss = ops.sum(ops.square(self.scale)) / ops.shape(x)[0]
        self.add_loss(0.5 * loss)
        return x * self.scale


class Spreads(keras.layers.Layer):
    """Divides by the deviation of the rows that are there."""

    def call(self, x):
        return x / (0.1 + ops.std(x, axis=0)) * ops.abs(x)


def normalization(**options):
    """BatchNormalization, after a layer that combines rows."""
    layer = keras.layers.BatchNormalization(**options)
    layer.trainable = bool(options)
    return [Spreads(), layer]


LAYERS = {
    "weights_over_rows": lambda: [Shares()],
    "synchronized": lambda: normalization(synchronized=True),
    "frozen": normalization,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_combine_rows(name):
    def train(strategy):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            inputs = keras.Input((FEATURES,))
            model = keras.Sequential([inputs, *LAYERS[name](), *net()])
            model.compile(keras.optimizers.SGD(0.02), "mse")
        options = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(X, Y, epochs=2, **options)
        told = [str(w.message) for w in caught if WORDS in str(w.message)]
        return model.get_weights(), told

    expected, _ = train(ks.OneDeviceStrategy("CPU:0"))
    weights, told = train(mirrored(3))
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_in_each_place(name, place, replicas):
    check(LOSSES[name], place, replicas)
