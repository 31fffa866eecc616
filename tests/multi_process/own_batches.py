"""What each process reads of batches that are its own, and what it learns."""

import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.multi_process import own_rows

warnings.filterwarnings("ignore", "Your input ran out of data")
warnings.filterwarnings("ignore", "A dataset is split by its files")
warnings.filterwarnings("ignore", "A dataset that reads files")
# AutoGraph looks for the source of lambdas.
warnings.filterwarnings("ignore", category=DeprecationWarning)


class Seen(keras.layers.Layer):
    """Remembers its rows, those of padding left out, since it last forgot."""

    rows: list[int] = []

    def call(self, x):
        jax.debug.callback(self._see, x, ordered=False)
        return x

    @classmethod
    def _see(cls, x):
        cls.rows += [row for row in own_rows.numbers(x) if row >= 0]

    @classmethod
    def forget(cls):
        """The rows that it remembers."""
        jax.effects_barrier()
        rows, cls.rows = cls.rows, []
        return rows


class Steps(keras.callbacks.Callback):
    """Remembers the rows of each step."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append(Seen.forget())


def build(*layers):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((1,)), *layers, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def read_and_fit(directory, cases):
    """For each case the rows of each step, and the weights after a fit."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build(Seen())
    weights = model.get_weights()
    found = {}
    for case in cases:
        # One model for all cases, as compiling one takes a second.
        model.set_weights(weights)
        found[own_rows.name_case(*case)] = {
            "read": own_rows.read(strategy, directory, case),
            "fitted": _fit(model, directory, case),
            "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        }
        assert_replicated(model)
    return found


def _fit(model, directory, case):
    steps = Steps()
    Seen.forget()
    # Anew: each loop over a dataset has its own order.
    model.fit(
        own_rows.dataset(directory, *case),
        steps_per_epoch=own_rows.STEPS
        if own_rows.is_infinite(case[1])
        else None,
        callbacks=[steps],
        verbose=0,
    )
    return steps.rows
