"""Checkpoints in the middle of an update, with any number of replicas."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.variables import model_variables
from tests.support.combinations import combine
from tests.support.models import chain, compiled_in
from tests.support.plain_keras import dense, mirrored

_random = np.random.default_rng(0)
X = _random.normal(size=(48, 3)).astype("float32")
Y = _random.normal(size=(48, 1)).astype("float32")
K = 4


def net():
    return chain((3,), dense(8, activation="tanh"), dense(1))


def make(replicas):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=K),
        initial_scale=2.0**10,
    )
    return compiled_in(mirrored(replicas), net, optimizer, "mse")


def train(model, directory, epochs, **options):
    """Epochs of 3 steps; a checkpoint after each epoch, or as told."""
    kept = ks.callbacks.Checkpoint(directory / "kept", **{"keep": 99} | options)
    model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=[kept])
    return values(model)


def values(model):
    variables = model_variables.all_variables(model)
    return [np.asarray(v.value) for v in variables]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("then", combine([1, 2, 8], every=3))
def test_an_update_goes_on_with_other_replicas(tmp_path, then):
    keras.utils.set_random_seed(1)
    before = train(make(1), tmp_path / "one", 1)
    keras.utils.set_random_seed(1)
    model = make(4)
    # 3 of the 4 steps of an update are done: accumulators hold sums.
    assert_close(train(model, tmp_path / "four", 1), before)
    accumulators = model.optimizer.inner_optimizer._accumulated_gradients
    assert all(np.abs(np.asarray(v.value)).max() > 0 for v in accumulators)
    expected = train(make(1), tmp_path / "one", 5)
    assert_close(train(make(then), tmp_path / "four", 5), expected)


def test_a_run_with_the_same_saves_is_equal_bit_for_bit(tmp_path):
    every = {"save_every_steps": 1}
    keras.utils.set_random_seed(1)
    whole = train(make(2), tmp_path / "whole", 3, **every)
    keras.utils.set_random_seed(1)
    train(make(2), tmp_path / "cut", 2, **every)
    for one, other in zip(
        train(make(2), tmp_path / "cut", 3, **every), whole, strict=True
    ):
        np.testing.assert_array_equal(one, other)
