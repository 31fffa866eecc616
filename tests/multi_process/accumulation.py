"""Accumulated gradients on several processes; see `run_processes`."""

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.testing import assert_replicated
from tests.multi_process.scenarios import data

FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def build(strategy, k=3):
    with strategy.scope():
        ones = keras.initializers.Ones()
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, "tanh", kernel_initializer=ones),
                keras.layers.Dense(1, kernel_initializer=ones),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=k),
            initial_scale=2.0**8,
        )
        model.compile(optimizer, "mse")
    return model


def values(model):
    assert_replicated(model)
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(v.value).tolist() for v in variables]


class Reads(keras.callbacks.Callback):
    """Reads the optimizer in the middle of an epoch, on the chief alone."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        if jax.process_index() == 0:
            self.model.jax_state_sync()
            slot = self.model.optimizer.variables[4]
            self.read.append(np.array(slot.value).tolist())


def steps(callback=None, strategy=None):
    """Two fits of even batches, and one of five rows."""
    model = build(strategy or ks.MultiWorkerMirroredStrategy())
    x, y = data(37)
    callbacks = [Reads()] if callback else []
    for _ in range(2):
        model.fit(x, y, epochs=2, callbacks=callbacks, **FIT)
    read = callbacks[0].read if callback else None
    made = find_binding(model)._functions._made["train"]
    return values(model), read, list(made)
