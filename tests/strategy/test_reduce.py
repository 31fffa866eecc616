"""reduce, gather, local results: TF_SEMANTICS' table, and its mistakes."""

import contextlib
import copy
import pickle

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.plain_keras import mirrored


def per_replica(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.asarray(fn(context.replica_id_in_sync_group))
    )


@pytest.mark.parametrize("source", ["values", "run"])
@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "MEAN", ks.ReduceOp.SUM])
def test_elementwise_over_replicas(source, replicas, op):
    strategy = mirrored(replicas)
    value = per_replica(strategy, lambda i: np.float32([i, 2 * i + 1]))
    if source == "run":
        value = strategy.run(lambda v: v + 0, args=(value,))
    nest = strategy.reduce(op, {"a": [value]}, axis=None)
    table = np.array([[i, 2 * i + 1] for i in range(replicas)], "float32")
    is_mean = str(op).upper() == "MEAN"
    expected = table.mean(axis=0) if is_mean else table.sum(axis=0)
    np.testing.assert_allclose(nest["a"][0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "axis"),
    [
        ((4, 2), 0),
        ((4, 2), -2),
        ((3, 0, 1), 0),
        ((2, 2), (0, 1)),
        ((5, 1, 0, 0), (0,)),
    ],
)
def test_over_a_dimension_true_counts_divide(rows, axis):
    strategy = mirrored(len(rows))
    random = np.random.default_rng(0)
    data = [random.normal(size=(r, 3)).astype("float32") for r in rows]
    value = per_replica(strategy, lambda i: data[i])
    whole = np.concatenate(data)
    got = strategy.reduce("sum", value, axis=axis)
    np.testing.assert_allclose(got, whole.sum(axis=axis), rtol=1e-5, atol=1e-6)
    got = strategy.reduce("mean", value, axis=axis)
    np.testing.assert_allclose(got, whole.mean(axis=axis), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "axis"), [((4, 2), 0), ((3, 3), -1)])
def test_gather_keeps_the_order_of_replicas(rows, axis):
    strategy = mirrored(len(rows))
    value = per_replica(strategy, lambda i: np.full((rows[i], 3), i, "f4"))
    got = strategy.gather({"a": value}, axis=axis)["a"]
    parts = [np.full((r, 3), i) for i, r in enumerate(rows)]
    np.testing.assert_array_equal(got, np.concatenate(parts, axis=axis))
    assert strategy.gather(5, axis=0) == 5
    with pytest.raises(ValueError, match="must be an integer"):
        strategy.gather(value, axis=None)


@pytest.mark.parametrize(
    ("shape", "axis", "text"),
    [
        (lambda i: (), 0, "Zero-dimensional arrays"),
        (lambda i: (2,), 1, "out of bounds"),
        (lambda i: (2, i + 1), 0, "shapes that differ"),
    ],
)
def test_what_cannot_be_gathered(shape, axis, text):
    strategy = mirrored(2)
    value = per_replica(strategy, lambda i: np.ones(shape(i), "float32"))
    with pytest.raises((TypeError, ValueError), match=text):
        strategy.gather(value, axis=axis)


def test_losses_of_the_global_batch():
    strategy = mirrored(2)
    losses = per_replica(strategy, lambda i: np.float32([1 + i, 3]))

    def fn(losses):
        weights = jnp.array([2.0, 1.0])
        return (
            ks.compute_average_loss(losses),
            ks.compute_average_loss(losses, weights, global_batch_size=5),
            ks.scale_regularization_loss([jnp.ones((2,)), 2.0]),
        )

    plain, weighted, regular = (
        float(strategy.reduce("sum", v, axis=None))
        for v in strategy.run(fn, args=(losses,))
    )
    assert plain == pytest.approx(9 / 4)
    assert weighted == pytest.approx(12 / 5)
    assert regular == pytest.approx(4.0)
    with pytest.raises(ValueError, match="a loss for each row"):
        ks.compute_average_loss(1.0)


@pytest.mark.parametrize("is_debug", [False, True])
@pytest.mark.parametrize(
    ("replicas", "rows"), [(2, 6), (2, 3), (3, 4), (8, 3), (8, 16)]
)
def test_the_average_loss_of_a_batch_is_that_of_its_rows(
    replicas, rows, is_debug
):
    strategy = mirrored(replicas)
    x = np.arange(rows, dtype="float32") ** 2
    first = np.zeros(8, "float32")
    dataset = strategy.experimental_distribute_dataset(iter([first, x]))
    *_, batch = dataset
    with strategy.debug() if is_debug else contextlib.nullcontext():
        parts = strategy.run(ks.compute_average_loss, args=(batch,))
    total = strategy.reduce("sum", parts, axis=None)
    assert float(total) == pytest.approx(float(x.mean()))


def test_an_average_loss_of_rows_that_are_not_known_is_refused():
    strategy = mirrored(2)
    parts = [ks.PerReplica([np.ones(2), np.ones(n)]) for n in (1, 3)]
    with pytest.raises(ValueError, match="Pass `global_batch_size`"):
        strategy.run(
            lambda x, y: ks.compute_average_loss(x + y[:1]), args=parts
        )


@pytest.mark.parametrize("kind", ["stacked", "rows", "padded", "parts"])
def test_a_value_per_replica_is_pickled_with_all_its_values(kind):
    strategy = mirrored(3)
    rows = strategy.experimental_make_numpy_dataset(np.arange(9))
    size = 9 if kind == "rows" else 7
    batch = next(
        iter(strategy.experimental_distribute_dataset(rows.batch(size)))
    )
    value = {
        "stacked": lambda: strategy.run(
            lambda: 2 * ks.get_replica_context().replica_id_in_sync_group
        ),
        "rows": lambda: batch,
        "padded": lambda: batch,
        "parts": lambda: ks.PerReplica([np.full(2, k) for k in range(3)]),
    }[kind]()
    for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert len(copied.values) == 3
        for ours, theirs in zip(copied.values, value.values, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        doubled = strategy.run(lambda x: 2 * x, args=(copied,))
        for ours, theirs in zip(doubled.values, value.values, strict=True):
            np.testing.assert_array_equal(ours, 2 * np.asarray(theirs))


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_value_per_replica_is_printed_with_its_values(replicas):
    strategy = mirrored(replicas)
    value = strategy.run(
        lambda: 10 * ks.get_replica_context().replica_id_in_sync_group
    )
    lines = [f"  {k}: {10 * k}" for k in range(replicas)]
    assert str(value).splitlines() == ["PerReplica:{", *lines, "}"]
    assert f"{value}" == str(value)
    assert "PerReplica(" in repr(value)
    rows = next(
        iter(
            strategy.experimental_distribute_dataset(
                strategy.experimental_make_numpy_dataset(
                    np.arange(2 * replicas + 1)
                ).batch(2 * replicas + 1)
            )
        )
    )
    assert str(rows).startswith("PerReplica:{\n  0: [0, 1, 2]\n")
    seen = []
    strategy.run(lambda: seen.append(str(jnp.ones(2))))
    assert seen
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0], name="v")
    assert str(ks.Mirrored(variable.value)) == "Mirrored:[1., 2.]"
