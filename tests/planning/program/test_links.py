"""The links that groups of chips have, and how long collectives use them."""

import pytest

from keras_strategies.passes.hlo import Collective
from keras_strategies.planning.program.links import make_timer
from keras_strategies.tpu.chips import find_chip
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick


def share(shape, group, kind="TPU v5 lite"):
    """Returns the share of the links that a group can use."""
    devices = make_slice(shape, kind=kind)
    chip = find_chip(devices[0])
    places = {d.coords: k for k, d in enumerate(devices)}
    groups = (tuple(places[coords] for coords in group),)
    collective = Collective(kind="all-gather", size=1e9, groups=groups)
    sent = 1e9 * (1 - 1 / len(group))
    seconds = make_timer(chip, devices)(collective)[0]
    return sent / seconds / chip.link_bandwidth


def box(x, y, z=1):
    return [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]


@pytest.mark.parametrize(
    ("shape", "group", "expected"),
    [
        # All chips of a square without rings: its corners have 2 of 4 links.
        ((4, 4, 1), box(4, 4), 2 / 4),
        # Both dimensions are rings.
        ((16, 16, 1), box(16, 16), 1.0),
        # One dimension of the box is a ring, at the edges of the other.
        ((16, 16, 1), box(16, 4), 3 / 4),
        ((16, 16, 1), box(8, 8), 2 / 4),
        ((2, 2, 1), box(2, 2), 2 / 4),
        ((4, 4, 1), box(4, 1), 1 / 4),
        # The places of four boxes of 16 x 4, which use the links between at
        # the same time: two links, one quarter each.
        ((16, 16, 1), [(0, y, 0) for y in (0, 4, 8, 12)], 1 / 4),
    ],
)
def test_the_chip_with_the_fewest_links_counts(shape, group, expected):
    assert share(shape, group) == pytest.approx(max(expected, 1 / 4))


def test_cubes_of_three_dimensions_are_rings():
    assert share((4, 4, 4), box(4, 4, 4), "TPU v5") == pytest.approx(1.0)
    assert share((4, 4, 4), box(4, 4, 2), "TPU v5") == pytest.approx(5 / 6)
    assert share((2, 2, 2), box(2, 2, 2), "TPU v5") == pytest.approx(3 / 6)


def test_a_pair_of_neighbors_uses_one_link():
    devices = make_slice((2, 2, 1))
    chip = find_chip(devices[0])
    swap = Collective(
        kind="collective-permute", size=1e9, groups=((0, 1), (1, 0))
    )
    assert make_timer(chip, devices)(swap)[0] == pytest.approx(1e9 / 50e9)


def test_a_sum_goes_around_twice():
    devices = make_slice((2, 2, 1))
    chip = find_chip(devices[0])
    timer = make_timer(chip, devices)
    given = {"size": 4e9, "groups": ((0, 1, 2, 3),)}
    gather, total = (
        timer(Collective(kind=kind, **given))[0]
        for kind in ("all-gather", "all-reduce")
    )
    assert gather == pytest.approx(3e9 / 100e9)
    assert total == 2 * gather
