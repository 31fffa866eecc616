"""Times of collectives of GPUs, by hand."""

import pytest

from keras_strategies.passes.hlo import Collective
from keras_strategies.planning.program.links import make_timer
from keras_strategies.tpu.chips import find_chip
from tests.support.gpus import make_hosts

pytestmark = pytest.mark.quick

GPUS = make_hosts(4, 8)
CHIP = find_chip(GPUS[0])
NVLINK, NETWORK = 450e9, 50e9
SIZE = 64e6
HOST = tuple(tuple(range(k, k + 8)) for k in range(0, 32, 8))
ACROSS = tuple(tuple(range(k, 32, 8)) for k in range(8))
HALVES = tuple(
    tuple(k for k in range(32) if k // 4 % 2 == half) for half in range(2)
)
ALL = (tuple(range(32)),)


def minimum(kind, groups, size=SIZE):
    collective = Collective(kind=kind, size=size, groups=groups)
    return make_timer(CHIP, GPUS)(collective)[0]


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all-gather", HOST, SIZE * 7 / 8 / NVLINK),
        ("reduce-scatter", HOST, SIZE * 7 / 8 / NVLINK),
        ("all-reduce", HOST, 2 * SIZE * 7 / 8 / NVLINK),
        # One GPU of each host: it sends through its own adapter.
        ("all-reduce", ACROSS, 2 * SIZE * 3 / 4 / NETWORK),
        # The eight adapters of a host share what leaves it: 400 GB/s.
        ("all-reduce", ALL, 2 * SIZE * 31 / 32 / NVLINK),
        ("all-gather", (), SIZE * 31 / 32 / NVLINK),
        ("all-gather", HALVES, SIZE * 3 / 4 / 4 / NETWORK),
        ("all-to-all", HOST, SIZE * 7 / 8 / NVLINK),
        ("all-to-all", ALL, SIZE * 3 / 4 / NETWORK),
        ("collective-permute", ((0, 1), (1, 0)), SIZE / NVLINK),
        ("collective-permute", ((0, 1), (7, 8)), SIZE / NETWORK),
        ("all-reduce", tuple((k,) for k in range(32)), 0.0),
    ],
)
def test_a_collective_uses_the_slower_of_two_networks(kind, groups, seconds):
    assert minimum(kind, groups) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "size", "microseconds"),
    [
        # What XLA estimates for eight H100s, in bytes of the full array.
        ("all-reduce", 36_872, 42.4),
        ("all-reduce", 1_496_624, 74.1),
        ("all-reduce", 16_814_088, 145.6),
        ("all-reduce", 33_554_432, 225.9),
        ("all-reduce", 67_108_864, 379.8),
        ("all-gather", 16_777_216, 82.2),
        ("all-gather", 67_108_864, 213.6),
    ],
)
def test_times_are_near_those_of_xla(kind, size, microseconds):
    collective = Collective(kind=kind, size=size, groups=HOST[:1])
    minimum, seconds = make_timer(CHIP, GPUS[:8])(collective)
    assert minimum < seconds
    assert microseconds / 1.6 < seconds * 1e6 < microseconds * 1.6


def test_groups_of_one_gpu_send_nothing():
    groups = tuple((k,) for k in range(32))
    collective = Collective(kind="all-reduce", size=SIZE, groups=groups)
    assert make_timer(CHIP, GPUS)(collective) == (0.0, 0.0)
