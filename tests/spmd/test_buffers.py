"""The choice of buffers, and what XLA compiles to fill one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.spmd import buffers
from keras_strategies.spmd.buffers import BETWEEN_PROCESSES, IN_PROCESS
from tests.support.combinations import combine

pytestmark = pytest.mark.quick


def on_one_replica(fn):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("replica",))
    everywhere = jax.sharding.PartitionSpec()
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )


def make_arrays(*sizes, dtype="float32"):
    return [jax.ShapeDtypeStruct((size,), dtype) for size in sizes]


@pytest.mark.parametrize("rule", [IN_PROCESS, BETWEEN_PROCESSES])
def test_larger_arrays_share_no_buffer(rule):
    maximum = rule.max_entries
    arrays = make_arrays(maximum, maximum + 1, 1, maximum)
    assert rule.groups(arrays) == [[0, 2, 3]]


def test_a_buffer_of_one_array_is_not_made():
    arrays = make_arrays(4, 4) + make_arrays(4, dtype="int32")
    assert IN_PROCESS.groups(arrays) == [[0, 1]]


def test_small_arrays_of_few_shapes_share_buffers():
    large = make_arrays(*[IN_PROCESS.max_entries + 1] * 3)
    maximum = make_arrays(*range(1, IN_PROCESS.max_shapes + 1), *[8] * 200)
    assert [len(g) for g in IN_PROCESS.groups(maximum + large)] == [
        len(maximum)
    ]
    more = maximum + make_arrays(IN_PROCESS.max_shapes + 1)
    assert IN_PROCESS.groups([*more, *large]) == []
    assert [len(g) for g in BETWEEN_PROCESSES.groups(more)] == [len(more)]


def test_all_sums_of_sixty_dense_layers_share_a_buffer():
    kernels = [32 * 16] + [16 * 16] * 59 + [16 * 10]
    biases = [16] * 60 + [10]
    arrays = make_arrays(*kernels, *biases, *[1] * 4)
    assert IN_PROCESS.groups(arrays) == [list(range(126))]


def test_booleans_share_no_buffer():
    arrays = make_arrays(4, 4) + make_arrays(4, 4, dtype="bool")
    assert IN_PROCESS.groups(arrays) == [[0, 1]]


@pytest.mark.parametrize(
    "dtype",
    combine(
        [
            *("float32", "bfloat16", "float16", "int8", "uint32"),
            *("complex64", "float8_e4m3fn"),
        ],
        every=3,
    ),
)
def test_arrays_are_unpacked_as_they_were_packed(dtype):
    arrays = [
        jnp.full(shape, value, dtype)
        for value, shape in enumerate([(2, 3), (), (0, 4), (5,), (1, 1)])
    ]
    buffer = on_one_replica(lambda *arrays: buffers.pack(arrays, "replica"))(
        *arrays
    )
    assert (buffer.shape, buffer.dtype) == ((13,), jnp.dtype(dtype))
    unpacked = on_one_replica(
        lambda buffer: buffers.unpack(buffer, arrays, "replica")
    )(buffer)
    for found, array in zip(unpacked, arrays, strict=True):
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(array))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_sums_are_evaluated_for_their_entries_only(order):
    def fill(rows):
        arrays = [jnp.tanh(rows).sum(0), rows[:6], jnp.cos(rows).sum()]
        return buffers.pack([arrays[k] for k in order], "replica")

    compiled = jax.jit(on_one_replica(fill)).lower(jnp.ones((32, 64))).compile()
    roots = roots_of_fused_sums(compiled.as_text())
    assert "dynamic-update-slice" in roots
    # XLA would evaluate a sum for every entry of the buffer.
    assert not roots & {"pad", "concatenate"}


def test_arrays_of_one_shape_are_copied_by_one_loop():
    """Loops that XLA compiles once, not once for each array."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("replica",))
    rows = jax.sharding.PartitionSpec("replica")

    def sum_all(rows, *arrays):
        buffer = buffers.pack([a * rows.sum() for a in arrays], "replica")
        total = jax.lax.psum(buffer, "replica")
        return [2 * a for a in buffers.unpack(total, arrays, "replica")]

    fn = jax.shard_map(
        sum_all,
        mesh=mesh,
        in_specs=(rows, *[jax.sharding.PartitionSpec()] * 9),
        out_specs=jax.sharding.PartitionSpec(),
    )
    args = jnp.ones(2), *[jnp.full((4, 3), k + 1.0) for k in range(9)]
    for k, found in enumerate(fn(*args)):
        np.testing.assert_array_equal(np.asarray(found), 4.0 * (k + 1))
    text = jax.jit(fn).lower(*args).compile().as_text()
    copies = [
        re.findall(r"constant\((\d+)\)", computation)
        for computation in text.split("\n\n")
        if "ENTRY" not in computation
        and re.search(r"dynamic-(update-)?slice\(", computation)
    ]
    # Two kinds of loops. If their places were known, each would have its own.
    assert len(copies) >= 9
    assert len(set(map(tuple, copies))) <= 2


def roots_of_fused_sums(text):
    """Returns the root operations of fusions with a `reduce`."""
    computations = [c for c in text.split("\n\n") if "ENTRY" not in c]
    roots = [
        re.search(r"ROOT \S+ = \S+ ([\w-]+)\(", computation)
        for computation in computations
        if " reduce(" in computation
    ]
    return {root.group(1) for root in roots if root}
