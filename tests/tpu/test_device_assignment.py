"""DeviceAssignment: against tf's over a table, and where tf is wrong."""

import itertools
import math

import jax
import numpy as np
import pytest
import tensorflow as tf

from keras_strategies.tpu.device_assignment import replica_mesh_devices
from keras_strategies.tpu.experimental import (
    SINGLE_CORE_ASSIGNMENT,
    DeviceAssignment,
    DeviceOrderMode,
    Topology,
)
from tests.support.slices import coordinates, make_slice

Theirs = tf.tpu.experimental.DeviceAssignment
TheirMode = tf.tpu.experimental.DeviceOrderMode

# mesh, host
MESHES = {
    "v5e:1x1": ((1, 1, 1, 1), (1, 1, 1)),
    "v5e:2x2": ((2, 2, 1, 1), (2, 2, 1)),
    "v5e:4x4": ((4, 4, 1, 1), (2, 2, 1)),
    "v5e:4x8": ((4, 8, 1, 1), (2, 2, 1)),
    "v5p:2x2x2": ((2, 2, 2, 1), (2, 2, 1)),
    "v5p:4x4x4": ((4, 4, 4, 1), (2, 2, 1)),
    "v3:4x4": ((4, 4, 1, 2), (2, 2, 1)),
    "tpu7x:2x2x1": ((2, 2, 1, 2), (2, 2, 1)),
    "v4:2x2x4": ((2, 2, 4, 2), (2, 2, 1)),
    "3x2": ((3, 2, 1, 1), (3, 1, 1)),
    "3x5x1x2": ((3, 5, 1, 2), (3, 1, 1)),
}
SHAPES = [
    None,
    (1, 1, 1, 1),
    (1, 1, 1, 2),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (2, 2, 1, 1),
    (2, 2, 1, 2),
    (4, 2, 1, 1),
    (2, 2, 2, 1),
    (4, 4, 1, 1),
    (3, 1, 1, 1),
    (1, 5, 1, 2),
    (0, 1, 1, 1),
    (2, 1, 1),
]
STRIDES = [
    None,
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (2, 2, 1, 1),
    (1, 1, 1, 2),
    (0, 1, 1, 1),
    (1, 1, 1, 1, 1),
]


def make_both(name, missing=0):
    mesh_shape, host = MESHES[name]
    places = coordinates(mesh_shape, host)
    places = places[: len(places) - missing]
    arguments = {"mesh_shape": mesh_shape, "device_coordinates": places}
    return Topology(**arguments), tf.tpu.experimental.Topology(**arguments)


def count_cores(topology, shape):
    cores = math.prod(topology.mesh_shape.tolist())
    maximum = max(cores // max(math.prod(shape or (1,)), 1), 1)
    return sorted({1, 2, 3, max(maximum - 1, 1), maximum, maximum + 1})


def get_result_or_error(function, *args):
    try:
        return function(*args), None
    except (ValueError, AssertionError) as error:
        return None, error


@pytest.mark.parametrize("mode", list(DeviceOrderMode))
@pytest.mark.parametrize("name", MESHES)
def test_build_answers_in_rows_as_tf(name, mode):
    ours, theirs = make_both(name)
    compared = built = 0
    for shape, stride in itertools.product(SHAPES, STRIDES):
        for count in count_cores(ours, shape):
            arguments = (shape, stride, count)
            mine, error = get_result_or_error(
                DeviceAssignment.build, ours, *arguments, int(mode)
            )
            other, expected = get_result_or_error(
                Theirs.build, theirs, *arguments, TheirMode.MESH
            )
            assert type(error) is type(expected), (arguments, error, expected)
            compared += 1
            if mine is None:
                assert "Received" in str(error)
                continue
            built += 1
            np.testing.assert_array_equal(
                mine.core_assignment,
                other.core_assignment,
                strict=True,
                err_msg=str(arguments),
            )
    assert compared > 200
    assert built >= 1


def test_replicas_have_the_cores_of_tfs_rings():
    ours, theirs = make_both("v5e:4x8")
    for shape in ((2, 1, 1, 1), (2, 2, 1, 1), (4, 4, 1, 1)):
        count = 32 // math.prod(shape)
        mine = DeviceAssignment.build(ours, shape, None, count)
        other = Theirs.build(theirs, shape, None, count, TheirMode.RING)
        cores = [
            {frozenset(map(tuple, replica)) for replica in built.tolist()}
            for built in (mine.core_assignment, other.core_assignment)
        ]
        assert cores[0] == cores[1]
        assert len(cores[0]) == count


@pytest.mark.parametrize("name", ["v5e:4x4", "tpu7x:2x2x1", "v4:2x2x4"])
def test_an_assignment_answers_as_tf(name):
    ours, theirs = make_both(name)
    count = math.prod(MESHES[name][0]) // 2
    mine = DeviceAssignment.build(ours, (2, 1, 1, 1), num_replicas=count)
    other = Theirs.build(theirs, (2, 1, 1, 1), None, count, TheirMode.MESH)
    assert mine.topology is ours
    assert mine.num_replicas == other.num_replicas
    assert mine.num_cores_per_replica == other.num_cores_per_replica
    for replica, core in itertools.product(range(count), range(2)):
        for question in (
            "coordinates",
            "tpu_ordinal",
            "host_device",
            "tpu_device",
        ):
            answer = getattr(mine, question)(replica, core)
            assert answer == getattr(other, question)(replica, core)
        for question in ("host_device", "tpu_device"):
            answer = getattr(mine, question)(replica, core, job="w")
            assert answer == getattr(other, question)(replica, core, job="w")
    for task, core in itertools.product(range(ours.num_tasks), range(2)):
        answer = mine.lookup_replicas(task, core)
        assert answer == other.lookup_replicas(task, core)
    for task, core in ((99, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="contains logical_core"):
            other.lookup_replicas(task, core)
        with pytest.raises(ValueError, match="No replica"):
            mine.lookup_replicas(task, core)


def test_replicas_need_all_their_devices():
    ours, _ = make_both("v5e:4x4", missing=1)
    with pytest.raises(ValueError, match="No device"):
        DeviceAssignment.build(ours, (2, 2, 1, 1), num_replicas=4)


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", [1], 2**40])
def test_a_number_of_replicas_is_positive(count):
    ours, _ = make_both("v5e:4x4")
    with pytest.raises(ValueError, match="num_replicas"):
        DeviceAssignment.build(ours, num_replicas=count)


@pytest.mark.parametrize("shape", [(1.5, 1, 1, 1), "2x2", [[1, 1], [1]]])
def test_a_shape_of_no_integers_is_refused(shape):
    ours, _ = make_both("v5e:4x4")
    with pytest.raises(ValueError, match="`computation_shape`"):
        DeviceAssignment.build(ours, shape)


def test_order_modes_have_the_numbers_of_tf():
    assert {mode.name: int(mode) for mode in DeviceOrderMode} == {
        mode.name: int(mode) for mode in TheirMode
    }


def test_build_takes_a_serialized_topology():
    ours, _ = make_both("v5e:4x4")
    built = DeviceAssignment.build(ours.serialized(), num_replicas=2)
    assert built.topology == ours


@pytest.mark.parametrize(
    "cores", [[[0, 0, 0, 0]], [[[0, 0, 0]]], [[[[0, 0, 0, 0]]]]]
)
def test_a_wrong_shape_is_refused_as_in_tf(cores):
    ours, theirs = make_both("v5e:4x4")
    with pytest.raises(ValueError, match="core_assignment"):
        Theirs(theirs, cores)
    with pytest.raises(ValueError, match=r"\(replicas, cores, 4\)"):
        DeviceAssignment(ours, cores)


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        # tf takes all but the second.
        ([[[-1, 0, 0, 0]]], "Coordinates must be"),
        ([[[4, 0, 0, 0]]], "Coordinates must be"),
        ([[[3, 3, 0, 0]]], "No device is at"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "only once"),
        ([[[0, 0, 0, 0], [0, 0, 0, 0]]], "only once"),
        (np.zeros((0, 1, 4), int), "at least one"),
        ([[[0.5, 0, 0, 0]]], "32-bit integers"),
    ],
)
def test_impossible_assignments_are_refused(cores, text):
    ours, theirs = make_both("v5e:4x4", missing=1)
    if text != "Coordinates must be":
        Theirs(theirs, cores)
    with pytest.raises((ValueError, IndexError), match=text):
        DeviceAssignment(ours, cores)


@pytest.mark.parametrize("place", [(1, 0), (0, 1)])
def test_a_core_that_is_not_there_is_refused(place):
    ours, _ = make_both("v5e:4x4")
    built = DeviceAssignment(ours, SINGLE_CORE_ASSIGNMENT)
    with pytest.raises(IndexError, match="out of bounds"):
        built.coordinates(*place)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1)])
def test_an_assignment_gives_the_devices_of_a_mesh(shape):
    topology = Topology.from_devices(jax.devices())
    count = 8 // shape[0]
    built = DeviceAssignment.build(topology, shape, num_replicas=count)
    devices = replica_mesh_devices(built)
    assert devices.shape == (count, shape[0])
    assert sorted(devices.flat, key=lambda d: d.id) == jax.devices()
    mesh = jax.sharding.Mesh(devices, ("replica", "model"))
    assert mesh.shape == {"replica": count, "model": shape[0]}


def test_devices_lie_where_the_assignment_says():
    topology = Topology.from_devices(make_slice((4, 4, 1)))
    built = DeviceAssignment.build(topology, (2, 2, 1, 1), num_replicas=4)
    devices = replica_mesh_devices(built)
    for replica, core in np.ndindex(4, 4):
        place = built.coordinates(replica, core)
        assert devices[replica, core].coords == place[:3]
    # Each replica is one host.
    for cores in devices:
        assert len({device.process_index for device in cores}) == 1


def test_a_topology_without_devices_gives_no_mesh():
    ours, _ = make_both("v5e:4x4")
    with pytest.raises(ValueError, match="from_devices"):
        replica_mesh_devices(DeviceAssignment(ours, SINGLE_CORE_ASSIGNMENT))
