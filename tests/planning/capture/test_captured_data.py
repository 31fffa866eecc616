"""Distributed datasets of a planned script, iterated by hand."""

import jax
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.fit.inputs import choose_source
from keras_strategies.planning.capture.captured_data import CapturedData
from keras_strategies.spmd import values
from keras_strategies.spmd.mesh import ReplicaMesh

REPLICAS, ROWS = 4, 20


@pytest.fixture
def mesh():
    return ReplicaMesh(devices=jax.devices()[:REPLICAS])


def captured(mesh, factor=1, batch_size=8):
    """The data of a script: of 20 rows two batches and a half."""
    x = np.arange(3 * ROWS, dtype="float32").reshape(ROWS, 3)
    y = np.arange(ROWS, dtype="int32")
    data = ks.MirroredStrategy().experimental_make_numpy_dataset((x, y))
    host = ReplicaMesh(devices=jax.devices()[:1])
    source = choose_source.make_dataset_source(data.batch(batch_size), host)
    return CapturedData(source, host, mesh, factor)


def shapes_in(batches):
    return [[leaf.arrays[0].shape for leaf in batch] for batch in batches]


def test_each_batch_is_a_value_per_replica_without_numbers(mesh):
    x, y = next(iter(captured(mesh)))
    for leaf, shape, dtype in ((x, (8, 3), "float32"), (y, (8,), "int32")):
        assert isinstance(leaf, values.PerReplica)
        assert leaf.layout == values.ROWS
        (array,) = leaf.arrays
        assert isinstance(array, jax.ShapeDtypeStruct)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.sharding == mesh.split
    assert [part.shape for part in x.values] == [(2, 3)] * REPLICAS


def test_an_epoch_has_the_batches_of_the_data_and_ends(mesh):
    data = captured(mesh)
    expected = [[(8, 3), (8,)], [(8, 3), (8,)], [(4, 3), (4,)]]
    assert shapes_in(data) == expected
    # Each iteration is an epoch.
    assert shapes_in(data) == expected


@pytest.mark.parametrize(
    ("batch_size", "factor", "rows"),
    [
        (8, 1, [8, 8, 4]),
        # As many as all replicas share evenly.
        (7, 1, [8, 8, 8]),
        (3, 1, [4] * 7),
        # What the source yields is a replica's.
        (7, REPLICAS, [28, 28, 24]),
    ],
)
def test_rows_that_all_replicas_share_evenly(mesh, batch_size, factor, rows):
    data = captured(mesh, factor, batch_size)
    assert [x[0] for (x, _) in shapes_in(data)] == rows


def test_a_script_may_take_batches_one_by_one(mesh):
    iterator = iter(captured(mesh))
    first = iterator.get_next()
    state = iterator.get_state()
    assert iterator.get_next_as_optional().has_value()
    resumed = iter(captured(mesh))
    resumed.set_state(state)
    assert len(shapes_in(resumed)) == 2
    assert shapes_in([first]) == [[(8, 3), (8,)]]
    assert len(shapes_in(iterator)) == 1
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_first_batch_of_fit_has_the_rows_that_it_was_given(mesh):
    x, y = captured(mesh, batch_size=7).first_shapes()
    assert (x.shape, y.shape) == ((7, 3), (7,))
    x, _ = captured(mesh, REPLICAS, 7).first_shapes()
    assert x.shape == (28, 3)
