"""The default order of a slice's devices: processes stay together."""

import itertools

import jax
import pytest

from keras_strategies.tpu.device_groups import default_device_order
from tests.support.slices import Tpu, group_devices, make_slice

pytestmark = pytest.mark.quick


def find_runs(devices):
    owners = [device.process_index for device in devices]
    return [owner for owner, _ in itertools.groupby(owners)]


CASES = [
    ((2, 2, 1), {}),
    ((4, 4, 1), {}),
    ((16, 16, 1), {}),
    ((2, 4, 1), {"host": (2, 4, 1), "kind": "TPU v6 lite"}),
    ((16, 16, 1), {"host": (4, 2, 1), "kind": "TPU v6 lite"}),
    ((8, 8, 16), {"kind": "TPU v5"}),
    ((4, 4, 4), {"kind": "TPU7x", "num_cores": 2}),
    ((2, 2, 2), {"kind": "TPU v4", "num_cores": 2}),
    ((6, 2, 1), {}),
]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_processes_stay_together_in_the_order_given(shape, options):
    devices = make_slice(shape, **options)
    assert default_device_order(devices) == tuple(devices)
    mixed = sorted(devices, key=lambda device: device.id)
    ordered = default_device_order(mixed)
    assert sorted(ordered, key=devices.index) == devices
    assert find_runs(ordered) == sorted(set(find_runs(devices)))
    for _, process_devices in itertools.groupby(
        ordered, lambda device: device.process_index
    ):
        ids = [device.id for device in process_devices]
        assert ids == sorted(ids)


def test_cores_of_a_chip_follow_each_other():
    ordered = default_device_order(make_slice((4, 4, 1), num_cores=2))
    for first, second in zip(ordered[::2], ordered[1::2], strict=True):
        assert first.coords == second.coords
        assert (first.core_on_chip, second.core_on_chip) == (0, 1)


def test_slices_follow_each_other():
    first = make_slice((4, 4, 1))
    second = make_slice((4, 4, 1), slice_index=1, first_process=4)
    ordered = default_device_order([*second, *first])
    assert [d.slice_index for d in ordered] == [0] * 16 + [1] * 16
    assert find_runs(ordered) == list(range(8))


def test_slices_of_different_sizes_are_refused():
    first = make_slice((4, 4, 1))
    second = make_slice((2, 2, 1), slice_index=1, first_process=4)
    with pytest.raises(ValueError, match=r"\{0: 16, 1: 4\}"):
        default_device_order([*first, *second])


def test_a_slice_with_holes_keeps_each_process_together():
    devices = make_slice((4, 4, 1))[:-4]
    ordered = default_device_order(devices[::-1])
    assert sorted(ordered, key=devices.index) == devices
    assert find_runs(ordered) == [0, 1, 2]


def test_groups_have_one_order_of_their_chips():
    """XLA refuses sums between groups of which each has another order."""
    devices = make_slice((16, 16, 1))
    ordered, shards = group_devices(devices, 16)
    assert shards == 16
    groups = [ordered[i : i + 16] for i in range(0, 256, 16)]
    shifted = {
        tuple(
            (d.coords[0] - g[0].coords[0], d.coords[1] - g[0].coords[1])
            for d in g
        )
        for g in groups
    }
    assert len(shifted) == 1


@pytest.mark.parametrize(
    ("shape", "cores", "shards"),
    [
        ((4, 4, 1), 1, 16),
        ((8, 8, 1), 1, 64),
        ((16, 16, 1), 1, 64),
        ((2, 2, 4), 1, 16),
        ((2, 4, 4), 1, 32),
        # Entire 3-D slices of at least 64 devices.
        ((4, 4, 4), 1, 32),
        ((2, 4, 4), 2, 32),
        ((4, 4, 4), 2, 64),
        ((4, 4, 8), 1, 64),
        ((8, 8, 8), 1, 64),
    ],
)
def test_default_groups(shape, cores, shards):
    devices = make_slice(shape, num_cores=cores)
    assert group_devices(devices, None)[1] == shards
    whole = len(devices)
    assert group_devices(devices, whole)[1] == whole
    # Each of two slices is divided in the same way.
    other = make_slice(
        shape, num_cores=cores, slice_index=1, first_process=whole
    )
    assert group_devices([*devices, *other], None)[1] == shards


def test_devices_without_coordinates_keep_their_order():
    devices = jax.devices()[::-1]
    assert default_device_order(devices) == tuple(devices)


def test_one_device_is_an_order():
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0))
    assert default_device_order([device]) == (device,)
