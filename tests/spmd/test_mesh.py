"""The devices of a strategy as a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from keras_strategies.spmd.mesh import ReplicaMesh, copy_with_sharding

pytestmark = pytest.mark.quick

CPUS = tuple(jax.devices("cpu"))


def test_it_cannot_be_changed():
    mesh = ReplicaMesh(devices=CPUS[:2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.devices = CPUS


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_device_is_a_replica(count):
    mesh = ReplicaMesh(devices=CPUS[:count])
    assert mesh.num_replicas == count
    assert mesh.mesh.axis_names == ("replica",)
    assert tuple(mesh.mesh.devices) == CPUS[:count]
    assert mesh.platform == "cpu"


def test_replica_ids_follow_the_order_of_the_devices():
    mesh = ReplicaMesh(devices=(CPUS[2], CPUS[0]))
    array = jax.device_put(np.arange(4), mesh.split)
    rows = {s.device: s.data.tolist() for s in array.addressable_shards}
    assert rows == {CPUS[2]: [0, 1], CPUS[0]: [2, 3]}


def test_whole_is_a_copy_on_every_device():
    mesh = ReplicaMesh(devices=CPUS[:3])
    array = jax.device_put(np.arange(5), mesh.whole)
    assert len(array.addressable_shards) == 3
    for shard in array.addressable_shards:
        assert shard.data.tolist() == [0, 1, 2, 3, 4]


def test_stacked_splits_the_second_dimension():
    mesh = ReplicaMesh(devices=CPUS[:2])
    array = jax.device_put(np.arange(12).reshape(3, 4), mesh.stacked)
    shapes = {s.data.shape for s in array.addressable_shards}
    assert shapes == {(3, 2)}
    first = array.addressable_shards[0].data
    assert first.tolist() == [[0, 1], [4, 5], [8, 9]]


def test_shardings_are_made_once():
    mesh = ReplicaMesh(devices=CPUS[:2])
    assert mesh.whole is mesh.whole
    assert mesh.split is mesh.split


def pointers(array):
    return {
        shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards
    }


@pytest.mark.parametrize("shape", [(), (3,), (64, 64)])
def test_copies_share_no_buffer(shape):
    mesh = ReplicaMesh(devices=CPUS[:2])
    home = jax.sharding.SingleDeviceSharding(CPUS[0])
    value = np.full(shape, 7.0, "float32")
    first = jax.device_put(value, home)
    whole = copy_with_sharding(first, mesh.whole)
    again = copy_with_sharding(whole, mesh.whole)
    back = copy_with_sharding(again, home)
    same = copy_with_sharding(back, home)
    arrays = [first, whole, again, back, same]
    assert whole.sharding == again.sharding == mesh.whole
    assert back.sharding == home
    sets = list(map(pointers, arrays))
    assert len(set.union(*sets)) == sum(map(len, sets)) == 7
    # A program may take the copies; the others stay as they are.
    taken = jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
    taken(whole, again)
    for array in (first, back, same):
        np.testing.assert_array_equal(array, value)
