"""`all_gather` of arrays that are not of one size on all replicas."""

import contextlib

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored

X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
MODES = {"compiled": False, "debug": True}


def called(strategy, step, rows, *, debug=False):
    batch = next(iter(strategy.experimental_distribute_dataset(batches(rows))))
    mode = strategy.debug() if debug else contextlib.nullcontext()
    with mode:
        return batch, strategy.run(step, args=(batch,))


def batches(rows):
    return tf.data.Dataset.from_tensor_slices(X[:rows]).batch(rows)


def parts(batch, strategy):
    return [np.asarray(p) for p in strategy.experimental_local_results(batch)]


@pytest.mark.parametrize(
    ("sizes", "mode"),
    combine([(2, 7), (3, 7), (3, 2), (8, 23), (8, 16)], MODES, every=4),
)
def test_rows_are_concatenated_in_the_replicas_order(sizes, mode):
    replicas, rows = sizes

    def step(x):
        context = ks.get_replica_context()
        all_rows = context.all_gather(x, axis=0)
        doubled = context.all_gather({"a": x * 2, "b": x[:, 0]}, axis=0)
        # Those that are wider than its rows, and every other row.
        columns = context.all_gather(x.T, axis=-1)
        few = context.all_gather(x[::2], axis=0)
        return all_rows, doubled["a"], doubled["b"], columns, few

    strategy = mirrored(replicas)
    batch, found = called(strategy, step, rows, debug=MODES[mode])
    few = [p[::2] for p in parts(batch, strategy)]
    expected = [X, 2 * X, X[:, 0], X.T]
    expected = [
        e[:rows] if e.shape[0] == len(X) else e[:, :rows] for e in expected
    ]
    expected.append(np.concatenate(few))
    for ours, wanted in zip(found, expected, strict=True):
        for replica in strategy.experimental_local_results(ours):
            np.testing.assert_array_equal(np.asarray(replica), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_other_dimensions_must_be_alike(mode):
    def step(x):
        return ks.get_replica_context().all_gather(x, axis=1)

    with pytest.raises(
        ValueError, match="equal sizes in all dimensions except"
    ):
        called(mirrored(3), step, 7, debug=MODES[mode])


def test_gradients_flow_in_debug_mode():
    def step(x):
        def loss(x):
            rows = ks.get_replica_context().all_gather(x, axis=0)
            weights = ops.arange(rows.shape[0], dtype="float32")[:, None]
            return ops.sum(rows**2 * weights)

        return jax.grad(loss)(x)

    strategy = mirrored(3)
    _, found = called(strategy, step, 7, debug=True)
    found = np.concatenate(parts(found, strategy))
    # Each replica's loss is that of all rows.
    expected = 3 * 2 * X[:7] * np.arange(7, dtype="float32")[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_metric_of_all_rows_still_counts_each_once():
    strategy = mirrored(3)
    with strategy.scope():
        metric = keras.metrics.AUC(num_thresholds=20)

    def step(x):
        metric.update_state(
            ops.cast(x[:, 0] > 0, "int32"), ops.sigmoid(x[:, 1])
        )

    called(strategy, step, 7)
    plain = keras.metrics.AUC(num_thresholds=20)
    plain.update_state(X[:7, 0] > 0, ops.sigmoid(X[:7, 1]))
    np.testing.assert_allclose(metric.result(), plain.result(), rtol=1e-6)
