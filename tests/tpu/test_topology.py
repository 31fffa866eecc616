"""Topology: against tf's, of devices, serialized, and what is refused."""

import json

import jax
import numpy as np
import pytest
import tensorflow as tf

from keras_strategies.tpu.experimental import Topology
from tests.support.slices import coordinates, make_slice
from tests.test_import import run_python

MESHES = [
    ((1, 1, 1, 1), (1, 1, 1)),
    ((2, 2, 1, 1), (2, 2, 1)),
    ((2, 2, 1, 2), (2, 2, 1)),
    ((4, 4, 1, 1), (2, 2, 1)),
    ((4, 4, 1, 2), (2, 4, 1)),
    ((2, 2, 4, 1), (2, 2, 1)),
    ((3, 3, 1, 1), (3, 1, 1)),
]


def make_both(mesh_shape, host, missing=0):
    places = coordinates(mesh_shape, host)
    places = places[: len(places) - missing]
    ours = Topology(mesh_shape=mesh_shape, device_coordinates=places)
    theirs = tf.tpu.experimental.Topology(
        mesh_shape=mesh_shape, device_coordinates=places
    )
    return ours, theirs


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(("mesh_shape", "host"), MESHES)
def test_it_answers_as_tf(mesh_shape, host, missing):
    ours, theirs = make_both(mesh_shape, host, missing)
    assert ours.mesh_rank == theirs.mesh_rank == 4
    assert ours.num_tasks == theirs.num_tasks
    assert ours.num_tpus_per_task == theirs.num_tpus_per_task
    for name in ("mesh_shape", "device_coordinates", "missing_devices"):
        np.testing.assert_array_equal(
            getattr(ours, name), getattr(theirs, name), strict=True
        )
    for place in ours.device_coordinates.reshape(-1, 4):
        for name in (
            "task_ordinal_at_coordinates",
            "tpu_device_ordinal_at_coordinates",
            "cpu_device_name_at_coordinates",
            "tpu_device_name_at_coordinates",
        ):
            answer = getattr(ours, name)(place)
            assert answer == getattr(theirs, name)(place)
            assert type(answer) in (int, str)
        assert ours.tpu_device_name_at_coordinates(
            place, job="worker"
        ) == theirs.tpu_device_name_at_coordinates(place, job="worker")
        assert ours.cpu_device_name_at_coordinates(
            place, job="worker"
        ) == theirs.cpu_device_name_at_coordinates(place, job="worker")


@pytest.mark.parametrize(
    ("mesh_shape", "places"),
    [
        ((4, 4, 1), [[[0, 0, 0, 0]]]),
        ((4, 4, 1, 0), [[[0, 0, 0, 0]]]),
        ((4, 4, -1, 1), [[[0, 0, 0, 0]]]),
        ((4, 4, 1, 1), [[[0, 0, 0]]]),
        ((4, 4, 1, 1), [[[0, 0, 0, 0]], [[1, 0, 0, 0], [2, 0, 0, 0]]]),
        ((4, 4, 1, 1), "abc"),
    ],
)
def test_what_tf_refuses_is_refused_with_its_type(mesh_shape, places):
    with pytest.raises((ValueError, TypeError)) as theirs:
        tf.tpu.experimental.Topology(
            mesh_shape=mesh_shape, device_coordinates=places
        )
    with pytest.raises(theirs.type, match="Received"):
        Topology(mesh_shape=mesh_shape, device_coordinates=places)


@pytest.mark.parametrize("places", [[], [[0, 0, 0, 0]]])
def test_a_wrong_rank_is_named_where_tf_fails_to(places):
    arguments = {"mesh_shape": (4, 4, 1, 1), "device_coordinates": places}
    with pytest.raises(IndexError, match="tuple index"):
        tf.tpu.experimental.Topology(**arguments)
    with pytest.raises(ValueError, match=r"\(tasks, devices, 4\)"):
        Topology(**arguments)


@pytest.mark.parametrize(
    ("mesh_shape", "places", "text"),
    [
        # tf reads a negative coordinate from the other end.
        ((4, 4, 1, 1), [[[-1, 0, 0, 0]]], "must be inside"),
        # tf: a bare IndexError.
        ((4, 4, 1, 1), [[[4, 0, 0, 0]]], "must be inside"),
        # tf keeps the last.
        ((4, 4, 1, 1), [[[1, 0, 0, 0], [1, 0, 0, 0]]], "different coordinates"),
        # tf cuts it to 1.
        ((4, 4, 1, 1), [[[1.5, 0, 0, 0]]], "32-bit integers"),
        ((4, 4, 1, 1), [[[float("nan"), 0, 0, 0]]], "32-bit integers"),
        # tf tries to make arrays of that size.
        ((2**30, 2**30, 2, 2), [[[0, 0, 0, 0]]], "at most"),
        ((2**40, 1, 1, 1), [[[0, 0, 0, 0]]], "32-bit"),
    ],
)
def test_what_tf_takes_by_mistake_is_refused(mesh_shape, places, text):
    with pytest.raises(ValueError, match=text):
        Topology(mesh_shape=mesh_shape, device_coordinates=places)


def test_no_device_is_no_answer_where_tf_says_minus_one():
    ours, theirs = make_both((4, 4, 1, 1), (2, 2, 1), missing=1)
    place = theirs.missing_devices[0]
    assert theirs.task_ordinal_at_coordinates(place) == -1
    with pytest.raises(ValueError, match="No device"):
        ours.task_ordinal_at_coordinates(place)
    with pytest.raises(ValueError, match="No device"):
        ours.tpu_device_name_at_coordinates(place)


@pytest.mark.parametrize(
    "place", [(4, 0, 0, 0), (-1, 0, 0, 0), (0, 0, 0), (0,) * 5, 0]
)
def test_coordinates_outside_the_mesh_are_refused(place):
    ours, _ = make_both((4, 4, 1, 1), (2, 2, 1))
    with pytest.raises(IndexError, match="mesh_shape="):
        ours.task_ordinal_at_coordinates(place)


def test_arrays_cannot_be_changed():
    ours, _ = make_both((4, 4, 1, 1), (2, 2, 1), missing=1)
    for name in ("mesh_shape", "device_coordinates", "missing_devices"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(ours, name)[0] = 0


def test_serialized_comes_back():
    ours, _ = make_both((4, 4, 1, 2), (2, 4, 1), missing=1)
    again = Topology(serialized=ours.serialized())
    assert again == ours
    assert hash(again) == hash(ours)
    assert Topology(serialized=ours.serialized().decode()) == ours
    assert again != Topology.from_devices(make_slice((4, 4, 1)))
    assert again != "a topology"


@pytest.mark.parametrize(
    "serialized",
    [
        b"",
        b"\n\x04\x04\x04\x01\x01",
        "{",
        "[]",
        "{}",
        '{"format": "keras_strategies.tpu.Topology", "version": 2}',
        '{"format": "keras_strategies.tpu.Topology", "version": 1}',
        "[" * 100000,
    ],
)
def test_what_serialized_did_not_return_is_refused(serialized):
    with pytest.raises(ValueError, match="JSON of a topology"):
        Topology(serialized=serialized)


def test_serialized_content_is_checked():
    ours, _ = make_both((4, 4, 1, 1), (2, 2, 1))
    content = json.loads(ours.serialized())
    content["device_coordinates"][0][0][0] = 9
    with pytest.raises(ValueError, match="must be inside"):
        Topology(serialized=json.dumps(content))
    with pytest.raises(ValueError, match="JSON of a topology"):
        Topology(serialized=5)


@pytest.mark.parametrize(("mesh_shape", "host"), MESHES)
def test_devices_give_their_topology(mesh_shape, host):
    devices = make_slice(mesh_shape[:3], host, mesh_shape[3])
    topology = Topology.from_devices(reversed(devices))
    np.testing.assert_array_equal(topology.mesh_shape, mesh_shape)
    places = topology.device_coordinates
    np.testing.assert_array_equal(places, coordinates(mesh_shape, host))
    assert topology.missing_devices.size == 0
    found = [topology.device_at_coordinates(p) for p in places.reshape(-1, 4)]
    assert found == devices


def test_part_of_a_slice_counts_from_its_corner():
    devices = [d for d in make_slice((4, 4, 1)) if d.process_index == 3]
    topology = Topology.from_devices(devices)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 1]
    assert topology.num_tasks == 1
    assert topology.device_at_coordinates((0, 0, 0, 0)).coords == (2, 2, 0)


def test_cpus_lie_in_a_line():
    topology = Topology.from_devices(jax.devices())
    assert topology.mesh_shape.tolist() == [8, 1, 1, 1]
    assert topology.num_tasks == 1
    assert topology.num_tpus_per_task == 8
    for index, device in enumerate(jax.devices()):
        assert topology.device_at_coordinates((index, 0, 0, 0)) is device


def test_a_topology_of_coordinates_knows_no_devices():
    ours, _ = make_both((4, 4, 1, 1), (2, 2, 1))
    with pytest.raises(ValueError, match="from_devices"):
        ours.device_at_coordinates((0, 0, 0, 0))


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([], "four positive integers"),
        (make_slice((4, 4, 1))[:-1], "rows of equal length"),
        (make_slice((2, 2, 1)) * 2, "different coordinates"),
        (
            make_slice((2, 2, 1))
            + make_slice((2, 2, 1), slice_index=1, first_process=1),
            r"slices \[0, 1\]",
        ),
    ],
)
def test_devices_that_form_no_topology_are_refused(devices, text):
    with pytest.raises(ValueError, match=text):
        Topology.from_devices(devices)


@pytest.mark.parametrize(
    "name",
    ["", "v5e", "v5e:", "v5e:4", "4x4", "v5e:4x", "v5e:0x4", "v5e:-2x2", "a b"]
    + ["v5e:2x2\n", "v5e:99999x99999", f"v5e:{'9' * 9999}x2", None, 4],
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match="'v5e:4x4'"):
        Topology.from_name(name)


def test_missing_libtpu_is_named():
    code = """
import os, sys
# As where it is not installed.
os.environ.pop("TPU_LIBRARY_PATH", None)
sys.modules["libtpu"] = None
from keras_strategies.tpu.topology import Topology
Topology.from_name("v5e:2x2")
"""
    done = run_python(code, KERAS_BACKEND="jax")
    assert done.returncode != 0
    assert (
        "ImportError: Creating a topology from a name needs libtpu"
        in done.stderr
    )
    assert "pip install 'jax[tpu]'" in done.stderr
