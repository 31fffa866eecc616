"""Optimizers that add noise: all replicas add that of one device."""

import contextlib

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine, cover
from tests.support.plain_keras import dense, mirrored
from tests.support.strategies import make_strategy

ROWS, STEPS = 24, 3
X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
Y = X[:, :1] * 2


class Langevin(keras.optimizers.SGD):
    """Stochastic gradient Langevin dynamics (Welling & Teh, 2011)."""

    def __init__(self):
        super().__init__(0.1)
        self.seeds = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, rate):
        noise = keras.random.normal(variable.shape, seed=self.seeds)
        super().update_step(gradient + noise, variable, rate)


def objects():
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer = Langevin()
    optimizer.build([weight])
    return weight, optimizer, keras.layers.Dropout(0.5, seed=3)


def one_device():
    weight, optimizer, _ = objects()
    for _ in range(STEPS):
        gradient = 2 * X.T @ (X @ np.asarray(weight)) / ROWS
        optimizer.apply([jnp.asarray(gradient)], [weight])
    return np.asarray(weight)


def shares(replicas, is_even):
    """The rows of each replica; the last may have none."""
    sizes = [ROWS // replicas] * replicas
    if not is_even and replicas > 1:
        sizes = [ROWS - replicas + 2, *[1] * (replicas - 2), 0]
    return np.split(X, np.cumsum(sizes)[:-1])


def check_run(strategy, is_even):
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        weight, optimizer, dropout = objects()

    def step(x):
        noise = dropout(jnp.ones(64), training=True)

        def loss():
            return ((x @ weight.value) ** 2).sum() / ROWS

        _, gradients = ks.value_and_grad(loss, [weight])()
        optimizer.apply(gradients, [weight])
        return noise

    parts = shares(replicas, is_even)
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    for _ in range(STEPS):
        noise = strategy.run(step, args=(batch,))
    assert_replicated(weight, optimizer.seeds.state)
    np.testing.assert_allclose(weight, one_device(), rtol=1e-5)
    # What layers draw is each replica's own.
    drawn = map(np.asarray, strategy.experimental_local_results(noise))
    assert len({values.tobytes() for values in drawn}) == replicas


@pytest.mark.parametrize(
    "is_even", combine([True, False], every=2), ids=["even", "uneven"]
)
@pytest.mark.parametrize("replicas", combine([1, 2, 3, 8], every=2))
def test_run(replicas, is_even):
    check_run(mirrored(replicas), is_even)


def test_run_with_sharded_variables():
    check_run(make_strategy("sharded2"), is_even=True)


@pytest.mark.parametrize("replicas", combine([1, 2, 3], every=2))
def test_update(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        weight = keras.Variable(np.ones(2, "float32"))
        seeds = keras.random.SeedGenerator(3)

    def add_noise(variable):
        variable.assign_add(keras.random.normal((2,), seed=seeds))

    for _ in range(STEPS):
        strategy.extended.update(weight, add_noise)
    assert_replicated(weight, seeds.state)
    seeds = keras.random.SeedGenerator(3)
    draws = [keras.random.normal((2,), seed=seeds) for _ in range(STEPS)]
    np.testing.assert_allclose(weight, 1 + sum(draws), rtol=1e-6)


@pytest.mark.parametrize(
    ("replicas", "batch_size", "steps_per_execution"),
    cover((1, 2, 3, 8), (ROWS, 8, 9), (1, 2)),
)
def test_fit(replicas, batch_size, steps_per_execution):
    """In Keras's own fit the noise of all steps is one."""
    weights = []
    for strategy in (None, mirrored(replicas)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([dense(), keras.layers.Dropout(0.0)])
            model.compile(
                Langevin(), "mse", steps_per_execution=steps_per_execution
            )
        model.fit(
            X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        weights.append(model.get_weights())
    assert_replicated(*model.variables)
    for ours, plain in zip(weights[1], weights[0], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
