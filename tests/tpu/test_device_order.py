"""The default order of a slice's devices: measured in hops."""

import itertools

import jax
import pytest

from keras_strategies.tpu.device_order import default_device_order
from keras_strategies.tpu.rings import count_ring_hops
from tests.tpu.slices import Tpu, make_slice

pytestmark = pytest.mark.quick


def hops_of(devices, torus=None):
    return count_ring_hops([d.coords for d in devices], torus)


def runs_of(devices):
    owners = [device.process_index for device in devices]
    return [owner for owner, _ in itertools.groupby(owners)]


CASES = [
    ((2, 2, 1), {}),
    ((4, 4, 1), {}),
    ((4, 8, 1), {}),
    ((8, 8, 1), {}),
    ((8, 16, 1), {}),
    ((16, 16, 1), {}),
    ((4, 4, 1), {"kind": "TPU v6 lite"}),
    ((2, 4, 1), {"host": (2, 4, 1), "kind": "TPU v6 lite"}),
    ((8, 8, 1), {"host": (2, 4, 1), "kind": "TPU v6 lite"}),
    ((16, 16, 1), {"host": (4, 2, 1), "kind": "TPU v6 lite"}),
    ((2, 2, 2), {"kind": "TPU v5"}),
    ((4, 4, 4), {"kind": "TPU v5"}),
    ((8, 8, 16), {"kind": "TPU v5"}),
    ((2, 2, 1), {"kind": "TPU7x", "num_cores": 2}),
    ((4, 4, 4), {"kind": "TPU7x", "num_cores": 2}),
    ((2, 2, 2), {"kind": "TPU v4", "num_cores": 2}),
]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_neighbours_are_one_hop_apart_and_processes_together(shape, options):
    devices = make_slice(shape, **options)
    ordered = default_device_order(devices)
    assert sorted(ordered, key=devices.index) == devices
    num_chips = len({device.coords for device in devices})
    assert hops_of(ordered) == num_chips
    assert hops_of(ordered) <= hops_of(devices)
    runs = runs_of(ordered)
    assert len(runs) == len(set(runs))
    assert runs[0] == 0


@pytest.mark.parametrize(
    ("shape", "naive", "on_torus"),
    [
        ((4, 4, 1), 30, 24),
        ((16, 16, 1), 510, 384),
        ((8, 8, 16), 2046, 1552),
    ],
)
def test_order_of_jax_devices_takes_more_hops(shape, naive, on_torus):
    devices = make_slice(shape)
    assert hops_of(devices) == naive
    assert hops_of(devices, torus=shape) == on_torus
    assert hops_of(default_device_order(devices), torus=shape) == len(devices)


@pytest.mark.parametrize("shape", [(2, 2, 4), (6, 6, 1), (6, 2, 1), (2, 6, 3)])
def test_where_no_ring_of_hosts_exists_the_shortest_way_is_taken(shape):
    devices = make_slice(shape)
    ordered = default_device_order(devices)
    assert len(runs_of(ordered)) == len(set(runs_of(ordered)))
    assert hops_of(ordered) < hops_of(devices)


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
    assert hops_of(ordered[:16]) == hops_of(ordered[16:]) == 16


def test_slices_of_different_sizes_are_refused():
    first = make_slice((4, 4, 1))
    second = make_slice((2, 2, 1), slice_index=1, first_process=4)
    with pytest.raises(ValueError, match=r"\{0: 16, 1: 4\}"):
        default_device_order([*first, *second])


def test_a_slice_with_holes_keeps_each_process_together():
    devices = make_slice((4, 4, 1))[:-4]
    ordered = default_device_order(devices)
    assert sorted(ordered, key=devices.index) == devices
    assert len(runs_of(ordered)) == 3


def test_part_of_a_slice_is_a_ring_too():
    devices = [d for d in make_slice((4, 4, 1)) if d.coords[0] >= 2]
    assert hops_of(default_device_order(devices)) == 8


def test_devices_without_coordinates_keep_their_order():
    devices = jax.devices()[::-1]
    assert default_device_order(devices) == tuple(devices)


def test_one_device_is_an_order():
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0))
    assert default_device_order([device]) == (device,)


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="at least one device"):
        default_device_order([])
