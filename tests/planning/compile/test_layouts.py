"""Layouts in words, and boxes of devices."""

import pytest

from keras_strategies.experimental import FullySharded, Replicated, SlotsOnly
from keras_strategies.planning.compile import layouts as lib
from keras_strategies.planning.compile.layouts import Layout

pytestmark = pytest.mark.quick


def custom(path, shape):
    return None


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ("replicated", Layout()),
        ("slots", Layout(partitioner=SlotsOnly())),
        ("slots:64", Layout(partitioner=SlotsOnly(64))),
        ("sharded", Layout(partitioner=FullySharded())),
        ("sharded:8", Layout(partitioner=FullySharded(8))),
        ("model:4", Layout(cores=4)),
        ("sharded:16+model:4", Layout(partitioner=FullySharded(16), cores=4)),
        ("slots+model:2", Layout(partitioner=SlotsOnly(), cores=2)),
    ],
)
def test_words_give_a_layout_that_prints_as_them(given, layout):
    found = lib.parse_layout(given)
    assert found == layout
    assert str(found) == given


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("model:4 + sharded", "sharded+model:4"),
        ("replicated+model:4", "model:4"),
        ("model:1", "replicated"),
        (SlotsOnly(), "slots"),
        (SlotsOnly(4), "slots:4"),
        (FullySharded(), "sharded"),
        (FullySharded(shards=4), "sharded:4"),
        (custom, "custom"),
        (
            FullySharded(4, reduce_dtype="bfloat16"),
            "FullySharded(shards=4, reduce_dtype='bfloat16')",
        ),
        (SlotsOnly(min_size=1), "SlotsOnly(min_size=1)"),
        (Replicated("bfloat16"), "Replicated(reduce_dtype='bfloat16')"),
        (Layout(cores=8), "model:8"),
    ],
)
def test_the_name_of_a_layout(given, name):
    assert str(lib.parse_layout(given)) == name


def test_a_partitioner_of_the_user_s_own_is_used_as_it_is():
    own = FullySharded(shards=4, min_size=7)
    for partitioner in (own, custom):
        layout = lib.parse_layout(partitioner)
        assert layout.partitioner is partitioner


@pytest.mark.parametrize(
    "given",
    [
        *("", "+", "sharded+", "Sharded", "full", "model", "model:0"),
        *("model:-1", "model:x", "sharded:", "sharded:0", "slots+sharded"),
        *("replicated+slots", "replicated:4", "sharded:1234567", "model:1٤"),
        *("sharded:4:4", "sharded 4", "sharded+sharded", "model:2+model:4"),
    ],
)
def test_words_that_say_none_are_refused(given):
    with pytest.raises(ValueError, match="Pass, for example,") as caught:
        lib.parse_layout(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", [None, 4, ["sharded"], b"sharded"])
def test_what_are_no_words_is_refused(given):
    with pytest.raises(TypeError, match="names or partitioners"):
        lib.parse_layout(given)


@pytest.mark.parametrize(
    ("num_devices", "shards", "names"),
    [
        (1, 1, ["replicated"]),
        (4, 4, ["replicated", "slots", "sharded"]),
        (16, 16, ["replicated", "slots", "sharded"]),
        (256, 64, ["replicated", "slots", "sharded", "sharded:256"]),
        (1024, 64, ["replicated", "slots", "sharded", "sharded:256"]),
        (1024, 256, ["replicated", "slots", "sharded"]),
    ],
)
def test_layouts_that_are_tried(num_devices, shards, names):
    assert list(map(str, lib.list_layouts(num_devices, shards))) == names


@pytest.mark.parametrize(
    ("cores", "mesh_shape", "box"),
    [
        (1, (4, 4, 1, 1), (1, 1, 1, 1)),
        (2, (4, 4, 1, 1), (2, 1, 1, 1)),
        (4, (4, 4, 1, 1), (2, 2, 1, 1)),
        (4, (1, 4, 1, 1), (1, 4, 1, 1)),
        (8, (4, 4, 4, 1), (2, 2, 2, 1)),
        (8, (4, 4, 1, 1), (4, 2, 1, 1)),
        (2, (2, 2, 1, 2), (2, 1, 1, 1)),
        (8, (2, 2, 1, 2), (2, 2, 1, 2)),
        (3, (4, 4, 1, 1), None),
        (32, (4, 4, 1, 1), None),
    ],
)
def test_the_box_of_a_replica(cores, mesh_shape, box):
    assert lib.find_computation_shape(cores, mesh_shape) == box


def test_names_of_slices_are_taken_once_each():
    assert lib.check_topologies("v5e:4x4") == ["v5e:4x4"]
    given = ("v5e:4x4", "v5p:2x2x1", "v5e:4x4")
    assert lib.check_topologies(given) == ["v5e:4x4", "v5p:2x2x1"]
    for bad in (4, [], [4], {"v5e:4x4"}, [None]):
        with pytest.raises(TypeError, match="names of TPUs"):
            lib.check_topologies(bad)


@pytest.mark.parametrize(
    ("each", "replicas", "rows"),
    [(8, 4, 32), (0.5, 4, 4), (2.5, 4, 12), (1, 1, 1)],
)
def test_every_replica_has_rows(each, replicas, rows):
    assert lib.compute_rows(each, replicas) == rows
