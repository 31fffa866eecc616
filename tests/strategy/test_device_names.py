"""Names of devices, as users write them."""

import jax
import pytest

from keras_strategies.strategy import mirrored

pytestmark = pytest.mark.quick

CPUS = jax.devices("cpu")


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("cpu:0", 0),
        ("CPU:3", 3),
        ("/cpu:1", 1),
        ("/CPU:7", 7),
        ("cpu", 0),
        ("/device:CPU:2", 2),
        ("device:cpu:2", 2),
        (" cpu:4 ", 4),
        ("/job:worker/replica:0/task:1/device:CPU:5", 5),
        ("/job:localhost/replica:0/task:0/cpu:6", 6),
    ],
)
def test_a_name_means_platform_and_index(name, index):
    assert mirrored.find_device(name, CPUS) is CPUS[index]


@pytest.mark.parametrize(
    "name",
    ["cpu:8", "cpu:-1", "gpu:0", "tpu", "", "cpu:x", "0", "cpu:0:1", "cpu 0"],
)
def test_an_unknown_name_lists_what_exists(name):
    with pytest.raises(ValueError, match="Unknown device") as caught:
        mirrored.find_device(name, CPUS)
    text = str(caught.value)
    assert repr(name) in text
    for index in range(8):
        assert f"cpu:{index}" in text


def test_a_jax_device_means_itself():
    assert mirrored.find_device(CPUS[3], CPUS) is CPUS[3]


def test_a_jax_device_that_is_not_available_is_refused():
    with pytest.raises(ValueError, match="Available devices: cpu:0, cpu:1"):
        mirrored.find_device(CPUS[3], CPUS[:2])


@pytest.mark.parametrize("thing", [0, None, 1.5, object(), b"cpu:0"])
def test_another_type_is_refused_with_an_example(thing):
    with pytest.raises(TypeError, match="cpu:0"):
        mirrored.find_device(thing, CPUS)


def test_the_index_counts_the_platforms_own_devices():
    # What a machine with other devices first shows.
    assert mirrored.find_device("cpu:0", CPUS[4:]) is CPUS[4]


def test_one_name_is_one_device():
    assert mirrored.find_devices("cpu:1", CPUS) == (CPUS[1],)
    assert mirrored.find_devices(CPUS[1], CPUS) == (CPUS[1],)


def test_the_order_of_the_names_is_kept():
    names = ["cpu:2", CPUS[0], "/cpu:1"]
    assert mirrored.find_devices(names, CPUS) == (CPUS[2], CPUS[0], CPUS[1])


def test_no_names_are_no_devices():
    assert mirrored.find_devices([], CPUS) == ()


def test_local_devices_are_named_once():
    assert mirrored.local_devices() == CPUS
