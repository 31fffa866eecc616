"""Which initial values the chief sends to the other processes."""

import types

import keras
import numpy as np
import pytest

from keras_strategies.cluster.exchange.same_variables import Note
from keras_strategies.variables import initial_values

NOTED = Note(
    path="kernel",
    shape="(3,)",
    dtype="float32",
    trainable="trainable",
    initializer="Zeros",
)


class RandomZeros(keras.initializers.Zeros):
    """Computes other values in each process."""

    def __call__(self, shape, dtype=None, **kwargs):
        return np.random.default_rng().normal(size=shape)


@pytest.mark.parametrize(
    ("initializer", "is_sent"),
    [
        ("zeros", False),
        (keras.initializers.Ones(), False),
        (keras.initializers.Constant(2.0), False),
        ("glorot_uniform", True),
        (RandomZeros(), True),
    ],
)
def test_the_chief_sends_values_that_may_differ(
    initializer, is_sent, monkeypatch
):
    sent = []

    def share(processes, noted, data):
        sent.append(noted)
        return data

    monkeypatch.setattr(initial_values.same_variables, "share", share)
    monkeypatch.setattr(initial_values.same_variables, "note", lambda *_: None)
    monkeypatch.setattr(initial_values, "place", lambda value, _: value)
    mesh = types.SimpleNamespace(num_processes=2, processes=(0, 1), whole=None)
    made = initial_values.make_chief_initializer(initializer, mesh, NOTED)
    assert made((3, 4), dtype="float32").shape == (3, 4)
    assert sent == [NOTED] * is_sent
