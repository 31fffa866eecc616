"""Lookups in tables that replicas divide by columns: ids travel, not tables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies.passes.lookups import _add_rows as add_rows
from keras_strategies.passes.lookups import sends_less
from keras_strategies.passes.marked_updates import is_collecting, mark_update
from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    all_sum,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.spmd.sharded_map import sharded_map
from tests.support.combinations import combine

WHOLE = replicated_spec()
WORDS, WIDTH = 500, 24
# The dtype of rows that are exchanged.
SENT = r"all_to_all.*?-> tensor<[0-9x]*x(\w+)>"


def take(table, ids):
    return jnp.take(table, ids, axis=0)


def take_later(table, ids):
    return jnp.take(table, ids, axis=0) * 2 + take(table, ids[:, ::-1])


def take_in_half(table, ids):
    return take(table, ids).astype("bfloat16").astype("float32")


def index(table, ids):
    return table[ids]


def clip(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def take_again(table, ids):
    return jax.checkpoint(lambda w: jnp.tanh(take(w, ids)))(table)


def take_in_function(table, ids):
    return jax.jit(lambda w, i: jnp.tanh(w[i]))(table, ids)


def take_sorted(table, ids):
    ids = jnp.sort(ids, axis=None)
    rows = table.at[ids].get(indices_are_sorted=True)
    return rows.reshape(-1, 3, WIDTH)


LOOKUPS = {
    f.__name__: f
    for f in (
        *(take, take_later, take_in_half, index, clip, take_again),
        *(take_in_function, take_sorted),
    )
}


def make_step(mesh, spec, look_up, *, head=False):
    """One step of momentum on a loss of rows that are looked up."""

    def loss(table, ids, x):
        rows = look_up(table, ids)
        value = jnp.sum(jnp.sin(rows) * x[:, None, None])
        if head:
            value += jnp.sum(jnp.tanh(rows.reshape(-1, WIDTH) @ table.T)) * 0.01
        return value

    def step(table, slot, ids, x):
        value, grad = jax.value_and_grad(loss)(table, ids, x)

        def reduce(grads):
            return all_sum(grads, mesh.all_replicas)

        def update(grads, values):
            slot = 0.9 * values[1] + grads[0]
            return [values[0] - 0.1 * slot, slot]

        (value,) = all_sum([value], mesh.all_replicas)
        if not is_collecting():
            return value, *update(reduce([grad]), [table, slot])
        new = mark_update(
            update,
            reduce,
            [grad],
            [table, slot],
            reductions=[spec],
            specs=[spec, spec],
            divisor=1,
            key=[],
        )
        return value, *new

    return step


def compute(count, shards, look_up, ids=None, words=WORDS, sum_dtype=None, **k):
    """A step's results, those of the replicated step, and the lowered text."""
    mesh = ReplicaMesh(devices=jax.devices()[:count], shards=shards)
    sharding = NamedSharding(mesh.mesh, PartitionSpec(None, mesh.axis))
    spec = Sharded(sharding, 1, sum_dtype)
    random = np.random.default_rng(0)
    table = random.normal(size=(words, WIDTH)).astype("float32")
    slot = random.normal(size=(words, WIDTH)).astype("float32")
    if ids is None:
        ids = random.integers(0, words, (2 * count, 3))
        ids[:, 2] = ids[0, 0]
    ids = np.asarray(ids, "int32")
    x = random.normal(size=len(ids)).astype("float32")
    step = make_step(mesh, spec, look_up, **k)
    rows = split_spec(mesh)
    ours = sharded_map(
        step,
        mesh,
        in_specs=(spec, spec, rows, rows),
        out_specs=(WHOLE, spec, spec),
    )
    plain = replica_map(
        step, mesh, in_specs=(WHOLE, WHOLE, rows, rows), out_specs=WHOLE
    )
    wanted = jax.jit(plain)(table, slot, ids, x)
    found = jax.jit(ours)(table, slot, ids, x)
    assert found[1].sharding.spec == PartitionSpec(None, mesh.axis)
    return found, wanted, jax.jit(ours).lower(table, slot, ids, x).as_text()


def list_sent(text, kind):
    """The shapes that collectives of a kind return."""
    pattern = rf"stablehlo\.{kind}.*?-> tensor<((?:\d+x)*)[a-z]"
    return [s.strip("x") for s in re.findall(pattern, text, re.DOTALL)]


def assert_exchanged(text):
    """Ids are gathered, rows are exchanged, and no table is sent."""
    assert list_sent(text, "all_to_all")
    kinds = "all_gather", "reduce_scatter", "all_reduce"
    shapes = [s for kind in kinds for s in list_sent(text, kind)]
    # Between groups, shards of the gradient are summed.
    assert not any(s == f"{WORDS}x{WIDTH}" for s in shapes)


SIZES = [(2, None), (3, None), (4, 2), (8, None)]


def assert_equal(found, wanted, tolerance=1e-5):
    for ours, plain in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "size"), combine(LOOKUPS, SIZES, every=2))
def test_rows_are_exchanged(name, size):
    found, wanted, text = compute(*size, LOOKUPS[name])
    assert_equal(found, wanted)
    assert_exchanged(text)


@pytest.mark.parametrize("name", ["take", "clip"])
def test_ids_out_of_range(name):
    ids = [
        [0, -1, WORDS - 1],
        [-WORDS, 3, 3],
        [4, WORDS, 5],
        [-WORDS - 1, 1, 1],
    ]
    found, wanted, text = compute(2, None, LOOKUPS[name], ids)
    # The rows are NaN. They have no gradient.
    assert np.isnan(wanted[0]) == (name == "take")
    assert np.isfinite(wanted[1]).all()
    assert_equal(found, wanted)
    assert_exchanged(text)


@pytest.mark.parametrize("size", SIZES)
def test_a_tied_head_gathers_the_table_once(size):
    found, wanted, text = compute(*size, take, head=True)
    assert_equal(found, wanted)
    assert list_sent(text, "all_to_all")
    gathered = list_sent(text, "all_gather").count(f"{WORDS}x{WIDTH}")
    assert gathered == 1


def test_half_precision_is_sent_in_half():
    found, wanted, text = compute(4, None, take_in_half)
    assert_equal(found, wanted)
    assert re.findall(SENT, text, re.DOTALL) == ["bf16", "bf16"]


def test_gradients_are_sent_in_the_reduce_dtype():
    found, wanted, text = compute(4, 2, take, sum_dtype="bfloat16")
    assert_equal(found, wanted, tolerance=2**-6)
    assert re.findall(SENT, text, re.DOTALL) == ["f32", "bf16"]


def test_a_small_table_is_gathered():
    found, wanted, text = compute(4, None, take, words=4)
    assert_equal(found, wanted)
    assert list_sent(text, "all_gather") == [f"4x{WIDTH}"]
    assert not list_sent(text, "all_to_all")


@pytest.mark.parametrize(
    ("ids", "row_bytes", "words", "shards", "is_less"),
    [
        (2048, 128, 10_000_000, 16, True),
        (2048, 8192, 262_144, 64, True),
        (2048, 128, 1000, 16, False),
        # The ids of all replicas are more than narrow rows.
        (2048, 8, 20_000, 2, True),
        (2048, 8, 20_000, 64, False),
        (0, 128, 1, 2, True),
    ],
)
def test_what_sends_less(ids, row_bytes, words, shards, is_less):
    assert sends_less(ids, row_bytes, words * row_bytes, shards) == is_less


@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize(
    ("words", "columns", "dtype"),
    [
        (300, 32, "int32"),
        (301, 1, "uint8"),
        (127, 48, "int8"),
        (300, 24, "int32"),
    ],
)
def test_sums_of_tpus_side_by_side(mode, words, columns, dtype):
    random = np.random.default_rng(0)
    ids = random.integers(-2, words + 9, (3, 40, 1)).astype(dtype)
    rows = random.normal(size=(3, 40, columns)).astype("bfloat16")
    rows[0, ids[0, :, 0] < 0] = np.nan
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    zeros = jnp.zeros((words, columns))
    found = [
        jax.jit(add_rows, static_argnums=range(3, 6))(
            zeros, ids, rows, numbers, GatherScatterMode.from_any(mode), is_tpu
        )
        for is_tpu in (True, False)
    ]
    np.testing.assert_array_equal(*found)
    if mode == "drop":
        ids = ids.astype("int32")
        wanted = np.zeros((words, columns), "float32")
        is_known = (ids >= 0) & (ids < words)
        np.add.at(wanted, ids[is_known], rows[is_known[..., 0]])
        np.testing.assert_allclose(found[0], wanted, atol=1e-6)
