"""Asking a model's step, from inside, how many rows it is given."""

import typing

import keras
import numpy as np

from tests.support.plain_keras import dense

_random = np.random.default_rng(0)
X = _random.normal(size=(8, 3)).astype("float32")
Y = _random.normal(size=(8, 1)).astype("float32")
NOT_OURS = 8
"""Rows of a step of plain Keras: the whole batch."""


@keras.saving.register_keras_serializable("tests")
class RowsSeen(keras.layers.Layer):
    """Notes, under its name, the rows of every trace of its call."""

    noted: typing.ClassVar[list[tuple[str, int | None]]] = []

    def call(self, inputs):
        self.noted.append((self.name, inputs.shape[0]))
        return inputs

    def compute_output_shape(self, input_shape):
        return input_shape


def sequential(name="model"):
    """A built model; its first layer is called as the model is."""
    return keras.Sequential(
        [
            keras.Input((3,), name="rows"),
            RowsSeen(name=name),
            dense(4, activation="tanh", name="hidden"),
            dense(1, seed=2, name="out"),
        ],
        name=name,
    )


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, name="sgd")


def compile_(model):
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


def fit(model, epochs=1):
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0
    ).history


def rows_seen(act, model, *args):
    """The fewest rows that `model` saw in a trace while `act(model)` ran."""
    RowsSeen.noted.clear()
    act(model, *args)
    rows = [n for name, n in RowsSeen.noted if name == model.name]
    assert rows, "nothing was traced: the step was compiled before"
    return min(n for n in rows if n is not None)


def state_of(model):
    """All numbers that training changes."""
    slots = model.optimizer.variables if model.optimizer else []
    return [v.numpy() for v in (*model.variables, *slots)]


def assert_close(ours, plain):
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def trained_plain(epochs):
    """The state of a plain model after some epochs."""
    model = compile_(sequential())
    fit(model, epochs)
    return state_of(model)
