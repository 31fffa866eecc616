"""Arrays that a function updates by slices of themselves.

XLA computes such updates wrongly on CPU where a dimension of size 1 is added or
removed (`spmd/replica_map`), as a program does to the values of each replica.
"""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.plain_keras import mirrored

X = np.arange(56).reshape(7, 8) % 9


def shift(x):
    return x.at[1:].set(x[:-1])


def expect(x):
    return np.concatenate([x[:1], x[:-1]])


def sharded():
    return ks.MirroredStrategy(
        ["cpu:0", "cpu:1"],
        variable_partitioner=ks.experimental.FullySharded(min_size=1),
    )


def check(strategy, values, expected):
    values = strategy.experimental_local_results(values)
    for value, one in zip(values, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(value, "float32"), one)


MAKE = [lambda: mirrored(1), lambda: mirrored(2), lambda: mirrored(3), sharded]


@pytest.mark.parametrize("make", MAKE)
def test_each_replicas_values_are_shifted(make):
    strategy = make()
    size = strategy.num_replicas_in_sync
    for dtype in ("float32", "int32", "bfloat16"):
        x = jnp.asarray(X, dtype)
        result = strategy.run(lambda x: shift(x + 1), args=(x,))
        check(strategy, result, [expect(X + 1)] * size)
        own = strategy.experimental_distribute_values_from_function(
            lambda context, x=x: x + context.replica_id_in_sync_group
        )
        result = strategy.run(lambda x: shift(x) * 2, args=(own,))
        check(strategy, result, [expect(X + k) * 2 for k in range(size)])


@pytest.mark.parametrize("make", MAKE)
def test_each_replicas_variable_is_shifted(make):
    strategy = make()
    with strategy.scope():
        variable = keras.Variable(
            X.astype("float32"),
            synchronization="on_read",
            aggregation="only_first_replica",
            trainable=False,
        )
    for _ in range(2):
        strategy.run(lambda: variable.assign(shift(variable.value)))
    np.testing.assert_array_equal(np.asarray(variable), expect(expect(X)))


def test_uneven_rows_are_shifted():
    strategy = mirrored(2)
    rows = X.astype("float32")
    dataset = strategy.experimental_distribute_dataset(iter([rows]))
    for batch in dataset:
        result = strategy.run(shift, args=(batch,))
        check(strategy, result, [expect(rows[:4]), expect(rows[4:])])
