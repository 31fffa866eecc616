"""Gradients of replicated variables, summed in bfloat16 over the replicas.

All numbers are integers or their quotients by powers of two, so that nothing
but the sums is rounded, and the sums by hand are equal.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.strategies import cores_strategy

ROWS, INPUTS, OUTPUTS = 16, 8, 4


def make_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(-30, 30, (count * ROWS, INPUTS)).astype("float32")
    y = rng.integers(-30, 30, (count * ROWS, OUTPUTS)).astype("float32")
    return x, y


def make_model(strategy, **kwargs):
    with strategy.scope():
        layer = keras.layers.Dense(
            OUTPUTS, use_bias=False, kernel_initializer="zeros"
        )
        model = keras.Sequential([keras.Input((INPUTS,)), layer])
        model.compile(keras.optimizers.SGD(1.0, **kwargs), "mse")
    return model


def make_strategy(count, dtype="bfloat16"):
    return ks.MirroredStrategy(
        jax.devices()[:count],
        variable_partitioner=ks.experimental.Replicated(dtype),
    )


def compute_gradients(count, x, y):
    """Returns the gradient of each replica, of a kernel of zeros."""
    x, y = (a.reshape(count, ROWS, -1) for a in (x, y))
    return np.einsum("rni,rno->rio", x, -y) * 2 / (ROWS * OUTPUTS)


def sum_by_hand(gradients, dtype):
    """Returns the mean over the replicas, of a sum that is rounded."""
    rounded = jnp.asarray(gradients).astype(dtype).astype("float32")
    total = rounded.sum(0).astype(dtype).astype("float32")
    return np.asarray(total / len(gradients))


@pytest.mark.parametrize("count", [2, 8])
def test_a_step_of_fit_applies_the_rounded_sum(count):
    x, y = make_rows(count)
    model = make_model(make_strategy(count))
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    gradients = compute_gradients(count, x, y)
    found = model.get_weights()[0]
    np.testing.assert_array_equal(found, -sum_by_hand(gradients, "bfloat16"))
    assert (found != -gradients.mean(0)).any()


@pytest.mark.parametrize("count", [2, 8])
def test_accumulated_gradients_are_rounded_once(count):
    x, y = (
        np.concatenate(pair)
        for pair in zip(make_rows(count), make_rows(count, seed=1), strict=True)
    )
    model = make_model(make_strategy(count), gradient_accumulation_steps=2)
    half = count * ROWS
    model.fit(x, y, batch_size=half, shuffle=False, verbose=0)
    gradients = sum(
        compute_gradients(count, x[rows], y[rows])
        for rows in (slice(half), slice(half, None))
    )
    found = model.get_weights()[0]
    expected = -sum_by_hand(gradients / 2, "bfloat16")
    np.testing.assert_array_equal(found, expected)
    assert (found != -gradients.mean(0) / 2).any()


@pytest.mark.parametrize("size", [1e-8, 5e4])
def test_accumulated_gradients_of_a_scaled_loss_exceed_float16(size):
    strategy = make_strategy(2, "float16")
    with strategy.scope():
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="zeros"
        )
        model = keras.Sequential([keras.Input((2,)), layer])
        sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=1.0)
        model.compile(optimizer, "mse")
    x, y = np.ones((8, 2), "float32"), np.full((8, 1), size, "float32")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    found = model.get_weights()[0]
    np.testing.assert_allclose(found, np.full((2, 1), 2 * size), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 8])
def test_a_custom_loop_applies_the_rounded_sum(count):
    x, y = make_rows(count)
    found = run_once(make_strategy(count), count, x, y)
    gradients = compute_gradients(count, x, y)
    np.testing.assert_array_equal(found, -sum_by_hand(gradients, "bfloat16"))


@pytest.mark.parametrize("cores", [1, 2])
def test_gradients_of_one_replica_are_not_rounded(cores):
    x, y = make_rows(1)
    partitioner = ks.experimental.Replicated("bfloat16")
    strategy = cores_strategy(1, cores, partitioner=partitioner)
    found = run_once(strategy, 1, x, y)
    np.testing.assert_array_equal(found, -compute_gradients(1, x, y)[0])
    model = make_model(strategy)
    model.fit(x, y, batch_size=len(x), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], found)


def run_once(strategy, count, x, y):
    """Returns the kernel after one step of a custom loop."""
    model = make_model(strategy)
    weights, optimizer = model.trainable_variables, model.optimizer

    def step(x, y):
        def compute_loss(values):
            outputs, _ = model.stateless_call(values, [], x)
            return jnp.mean((outputs - y) ** 2) / count

        grads = jax.grad(compute_loss)([v.value for v in weights])
        optimizer.apply(grads, weights)

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(
            a.reshape(count, ROWS, -1)[context.replica_id_in_sync_group]
            for a in (x, y)
        )
    )
    strategy.run(step, rows)
    return model.get_weights()[0]


def test_a_wide_dtype_and_other_state_are_not_rounded():
    x, y = make_rows(8)
    strategy = make_strategy(8, "float32")
    model = make_model(strategy)
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    gradients = compute_gradients(8, x, y)
    np.testing.assert_array_equal(model.get_weights()[0], -gradients.mean(0))
    model = make_model(make_strategy(8))
    history = model.fit(
        x, y, batch_size=len(x), shuffle=False, verbose=0
    ).history
    assert history["loss"] == [np.float32((y**2).mean())]


def test_the_mesh_is_that_of_replicated_variables():
    strategy = make_strategy(8)
    assert strategy.mesh.mesh == ks.MirroredStrategy().mesh.mesh
    assert strategy.mesh.reduce_dtype == "bfloat16"
