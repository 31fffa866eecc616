"""Functions mapped over replicas, and their collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.passes.row_kinds import losses
from keras_strategies.spmd import buffers
from keras_strategies.spmd import replica_map as rm
from keras_strategies.spmd.mesh import ReplicaMesh
from tests.support.combinations import combine

pytestmark = pytest.mark.quick

CPUS = tuple(jax.devices("cpu"))
AXIS = "replica"
BUFFERINGS = [None, buffers.IN_PROCESS, buffers.BETWEEN_PROCESSES]


def mapped(fn, replicas, *, split_out=False):
    mesh = ReplicaMesh(devices=CPUS[:replicas])
    split, whole = rm.split_spec(mesh), rm.replicated_spec()
    return jax.jit(
        rm.replica_map(
            fn, mesh, in_specs=split, out_specs=split if split_out else whole
        )
    )


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_every_replica_sees_its_rows(replicas):
    data = np.arange(16)
    fn = mapped(
        lambda x: x * 10 + rm.replica_id(AXIS), replicas, split_out=True
    )
    ids = np.arange(16) // (16 // replicas)
    np.testing.assert_array_equal(fn(data), data * 10 + ids)


def make_leaves(x):
    """Arrays of mixed types and shapes that differ between replicas."""
    total = x.sum()
    return [
        total.astype("float32"),
        jnp.full((2, 3), total, "float32"),
        total.astype("int32"),
        jnp.full((4,), total, "bfloat16"),
        jnp.zeros((0, 2), "float32"),
        jnp.full((1, 1, 2), total, "int32"),
        jnp.full((3,), total, "float16"),
    ]


def sum_arrays(arrays, buffering):
    return buffers.sum_arrays(arrays, axis=AXIS, buffering=buffering)


@pytest.mark.parametrize(
    ("replicas", "buffering"), combine([1, 2, 3, 8], BUFFERINGS, every=2)
)
def test_sums_keep_order_shapes_and_types(replicas, buffering):
    data = np.arange(replicas, dtype="float32") + 1
    sums = mapped(lambda x: sum_arrays(make_leaves(x), buffering), replicas)(
        data
    )
    expected = jax.tree.map(
        lambda *parts: sum(np.asarray(p, "float64") for p in parts),
        *[make_leaves(jnp.asarray([value])) for value in data],
    )
    kinds = [(leaf.shape, leaf.dtype) for leaf in make_leaves(jnp.ones(1))]
    assert [(leaf.shape, leaf.dtype) for leaf in sums] == kinds
    for found, wanted in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found, "float64"), wanted)


@pytest.mark.parametrize("buffering", BUFFERINGS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_any_number_of_scalars_is_summed(count, buffering):
    def fn(x):
        return sum_arrays([x.sum() + i for i in range(count)], buffering)

    sums = mapped(fn, 2)(np.array([3.0, 4.0], "float32"))
    assert [float(s) for s in sums] == [7.0 + 2 * i for i in range(count)]


def test_all_sum_takes_python_numbers():
    sums = mapped(lambda x: rm.all_sum([1, 2.5, x.sum()], AXIS), 2)(
        np.zeros(2, "float32")
    )
    assert [float(s) for s in sums] == [2.0, 5.0, 0.0]


def test_small_arrays_of_a_type_share_a_collective():
    def collectives(buffering):
        fn = mapped(lambda x: sum_arrays(make_leaves(x), buffering), 2)
        jaxpr = str(jax.make_jaxpr(fn)(np.zeros(2, "float32")))
        return jaxpr.count("psum[") + jaxpr.count("psum_invariant[")

    assert collectives(None) == 7
    assert collectives(buffers.Buffering(max_entries=6, max_shapes=7)) == 4
    # The float32 scalar and the empty array; the int32 ones.
    assert collectives(buffers.Buffering(max_entries=2, max_shapes=7)) == 5
    # Their arrays have three shapes.
    assert collectives(buffers.Buffering(max_entries=2, max_shapes=2)) == 7


@pytest.mark.parametrize(
    ("transform", "buffering"),
    combine([jax.grad, jax.jacfwd, jax.hessian], BUFFERINGS, every=2),
)
def test_sums_are_differentiated_both_ways(transform, buffering):
    weights = [jnp.arange(4.0), jnp.array(2.0)]

    def fn(x):
        def loss(weights):
            sums = sum_arrays([w * x.sum() for w in weights], buffering)
            return sum(jnp.sum(total**2) for total in sums)

        return transform(loss)(weights)

    def expected(weights):
        # Each of two replicas differentiates the sum of both losses.
        return 2 * sum(jnp.sum((8.0 * w) ** 2) for w in weights)

    found = mapped(fn, 2)(np.array([3.0, 5.0]))
    if transform is jax.grad:
        scale = 3.0 / 8.0
        wanted = [scale * g for g in jax.grad(expected)(weights)]
        jax.tree.map(np.testing.assert_allclose, found, wanted)
    for leaf in jax.tree.leaves(found):
        assert np.isfinite(leaf).all()


def sum_from_two(x):
    """Sums over the replicas, if the first of all entries is at least 2."""
    is_summed = rm.all_min(x[0], AXIS) >= 2

    def compute(pair):
        return [x + y for x, y in zip(*pair, strict=True)]

    return rm.sum_if(is_summed, compute, [([x, x], [x, -x])], AXIS)


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("minimum", [1, 2])
def test_sums_depend_on_a_condition(replicas, minimum):
    data = np.arange(replicas, dtype="float32") + minimum
    doubled, zeros = mapped(sum_from_two, replicas, split_out=True)(data)
    is_summed = minimum == 2
    expected = np.full(replicas, 2 * data.sum()) if is_summed else 2 * data
    np.testing.assert_array_equal(doubled, expected)
    np.testing.assert_array_equal(zeros, np.zeros(replicas))


def test_conditional_sums_are_sure_unless_they_are_in_a_branch():
    def in_branch(x):
        return jax.lax.cond(x[0] > 0, sum_from_two, lambda x: [x, x], x)

    def run_branch(x):
        sums = jax.lax.cond(
            x[0] > 0, lambda x: rm.all_sum([x], AXIS), lambda x: [x], x
        )
        return [*sums, *sum_from_two(x)]

    found = [
        losses.has_unsure_collectives(
            jax.make_jaxpr(mapped(fn, 2, split_out=True))(np.ones(2))
        )
        for fn in (sum_from_two, in_branch, run_branch)
    ]
    assert found == [False, True, True]


def test_max_min_mean_and_rows():
    data = np.array([[1, -5], [4, 2], [-3, 0]], "float32")

    def fn(x):
        x = x[0]
        return (
            rm.all_max(x, AXIS),
            rm.all_min(x, AXIS),
            rm.all_mean(x, AXIS),
            rm.all_concatenate(x[None], AXIS),
        )

    highest, lowest, mean, every = mapped(fn, 3)(data)
    np.testing.assert_array_equal(highest, data.max(0))
    np.testing.assert_array_equal(lowest, data.min(0))
    np.testing.assert_allclose(mean, data.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(every, data)


def test_a_replica_differentiates_the_sum_of_all_losses():
    # The rule of tf.distribute; the steps divide by the replicas.
    def fn(x):
        def loss(w):
            return jnp.sum(rm.all_mean(w * x.sum(), AXIS))

        return rm.all_sum([jax.grad(loss)(1.0)], AXIS)[0]

    np.testing.assert_allclose(mapped(fn, 2)(np.array([3.0, 5.0])), 8.0)
