"""Host batches and how they reach the devices."""

import jax
import ml_dtypes
import numpy as np
import pytest

from keras_strategies.spmd.batches import global_batch, num_rows
from keras_strategies.spmd.batches import place as place_on
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import padded_rows

pytestmark = pytest.mark.quick

CPUS = tuple(jax.devices("cpu"))


def place(batches, mesh):
    return place_on([global_batch(batch, mesh) for batch in batches], mesh)


def make_mesh(count):
    return ReplicaMesh(devices=CPUS[:count])


def rows(count, width=2, start=0):
    values = np.arange(start, start + count * width, dtype="float32")
    return values.reshape(count, width)


@pytest.mark.parametrize(
    ("count", "replicas", "expected"),
    [
        (0, 8, 0),
        (1, 1, 1),
        (1, 8, 8),
        (7, 3, 9),
        (8, 8, 8),
        (2047, 4, 2048),
    ],
)
def test_padded_rows_is_the_next_multiple(count, replicas, expected):
    assert padded_rows(count, replicas) == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (np.zeros(1), 1),
        (np.zeros((5, 2)), 5),
        ((np.zeros((3, 2)), np.zeros(3)), 3),
        ((np.zeros((3, 2)), None, None), 3),
        ({"a": np.zeros((4, 0)), "b": [np.zeros((4, 1, 1))]}, 4),
        ((np.zeros(2, bool), np.zeros((2, 1), ml_dtypes.bfloat16)), 2),
        (np.zeros(6, "complex64"), 6),
    ],
)
def test_num_rows_is_the_common_first_dimension(batch, expected):
    assert num_rows(batch) == expected


@pytest.mark.parametrize(
    ("batch", "error", "parts"),
    [
        ((), ValueError, ["at least one row"]),
        ((None, None), ValueError, ["at least one row"]),
        (np.zeros((0, 3)), ValueError, ["at least one row", "0"]),
        (np.float32(3), ValueError, ["first dimension", "rank 0", "3"]),
        (
            {"x": np.zeros(4), "t": np.array(1)},
            ValueError,
            ["first dimension", "'t'", "rank 0", "Repeat"],
        ),
        (
            (np.zeros(4), np.zeros(5)),
            ValueError,
            ["same number of rows", "[0]", "4", "[1]", "5"],
        ),
        (np.array(["a", "b"]), TypeError, ["numbers", "<U1", "Encode"]),
        (np.array(["a", 1], object), TypeError, ["numbers", "object"]),
        (np.array([b"a"]), TypeError, ["numbers", "|S1"]),
        (
            np.array(["2020-01-01"], "datetime64[D]"),
            TypeError,
            ["numbers", "datetime64"],
        ),
    ],
)
def test_a_batch_that_has_no_rows_to_split_is_refused(batch, error, parts):
    with pytest.raises(error) as caught:
        num_rows(batch)
    for part in ("Received", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 9])
def test_place_splits_the_rows_and_repeats_the_last(count, replicas):
    mesh = make_mesh(replicas)
    (segment,) = place([(rows(count), np.arange(count))], mesh).segments
    assert (segment.rows, segment.steps) == (count, 1)
    x, index = segment.data
    assert x.sharding == mesh.split
    assert len(x) == padded_rows(count, replicas)
    np.testing.assert_array_equal(np.asarray(x)[:count], rows(count))
    for padding in np.asarray(x)[count:]:
        np.testing.assert_array_equal(padding, rows(count)[-1])
    for shard in index.addressable_shards:
        assert shard.data.shape == (padded_rows(count, replicas) // replicas,)


def test_place_keeps_the_structure_and_the_types():
    batch = (
        {"b": np.zeros((3, 1), "uint8"), "a": np.ones(3, bool)},
        None,
        [np.zeros((3, 2), ml_dtypes.bfloat16), np.zeros(3, "int32")],
    )
    (segment,) = place([batch], make_mesh(2)).segments
    assert jax.tree.structure(segment.data) == jax.tree.structure(batch)
    types = [str(leaf.dtype) for leaf in jax.tree.leaves(segment.data)]
    assert types == ["bool", "uint8", "bfloat16", "int32"]


def test_equal_neighbors_are_one_segment():
    batches = [rows(4, start=s) for s in (0, 100, 200)]
    mesh = make_mesh(2)
    (segment,) = place(batches, mesh).segments
    assert (segment.rows, segment.steps) == (4, 3)
    assert segment.data.sharding == mesh.stacked
    np.testing.assert_array_equal(segment.data, np.stack(batches))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 2], [(4, 2), (2, 1)]),
        ([4, 2, 4], [(4, 1), (2, 1), (4, 1)]),
        # Equal when padded, and yet of different length.
        ([4, 3, 3], [(4, 1), (3, 2)]),
        ([1], [(1, 1)]),
        ([], []),
    ],
)
def test_batches_of_other_length_start_a_segment(sizes, expected):
    execution = place([rows(size) for size in sizes], make_mesh(2))
    found = [(s.rows, s.steps) for s in execution.segments]
    assert found == expected


@pytest.mark.parametrize(
    "other",
    [rows(4, width=3), rows(4).astype("int32"), (rows(4),), [rows(4)]],
)
def test_batches_of_other_kind_start_a_segment(other):
    execution = place([rows(4), other], make_mesh(2))
    assert [s.steps for s in execution.segments] == [1, 1]


def test_indivisible_batches_are_stacked_with_their_padding():
    (segment,) = place([rows(3), rows(3, start=9)], make_mesh(2)).segments
    assert (segment.rows, segment.steps) == (3, 2)
    assert segment.data.shape == (2, 4, 2)
    np.testing.assert_array_equal(
        np.asarray(segment.data)[1, 2:], [[13, 14], [13, 14]]
    )


def test_an_execution_stays_where_it_is():
    execution = place([rows(4), rows(2)], make_mesh(2))
    moved = jax.device_put(execution, jax.devices()[3])
    assert moved == execution
    assert [s.rows for s in moved.segments] == [4, 2]
