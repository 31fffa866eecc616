"""The links that groups of chips have, and how long collectives use them."""

import pytest

from keras_strategies.passes.hlo_text import COLLECTIVES
from keras_strategies.planning.program.chips import find_chip
from keras_strategies.planning.program.hlo import parse
from keras_strategies.planning.program.links import (
    Collective,
    find_collectives,
    find_ends,
    make_timer,
)
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick


def share(shape, group, kind="TPU v5 lite"):
    """Returns the share of the links that a group can use."""
    devices = make_slice(shape, kind=kind)
    chip = find_chip(devices[0])
    places = {d.coords: k for k, d in enumerate(devices)}
    groups = (tuple(places[coords] for coords in group),)
    collective = Collective(
        kind="all-gather", size=1e9, groups=groups, key=None
    )
    sent = 1e9 * (1 - 1 / len(group))
    seconds = make_timer(chip, devices)(collective)
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
        kind="collective-permute", size=1e9, groups=((0, 1), (1, 0)), key=None
    )
    assert make_timer(chip, devices)(swap) == pytest.approx(1e9 / 50e9)


def test_a_sum_goes_around_twice():
    devices = make_slice((2, 2, 1))
    chip = find_chip(devices[0])
    timer = make_timer(chip, devices)
    given = {"size": 4e9, "groups": ((0, 1, 2, 3),), "key": None}
    gather, total = (
        timer(Collective(kind=kind, **given))
        for kind in ("all-gather", "all-reduce")
    )
    assert gather == pytest.approx(3e9 / 100e9)
    assert total == 2 * gather


TEXT = """HloModule f

%start (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8] parameter(0)
  %gather = bf16[16,8] all-gather(%p), replica_groups={{0,1,2,3}}, \
frontend_attributes={chain_id="5"}
  ROOT %begin = bf16[16,8] custom-call(%gather), \
custom_call_target="AsyncCollectiveStart"
}

%middle (p: bf16[4,8]) -> bf16[16,8] {
  %p.1 = bf16[4,8] parameter(0)
  ROOT %gather.1 = bf16[16,8] all-gather(%p.1), \
replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="5"}
}

%done (p: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8] parameter(0)
  %gather.2 = bf16[16,8] all-gather(%p.2), \
replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="5"}
  ROOT %end = bf16[16,8] custom-call(%gather.2), \
custom_call_target="AsyncCollectiveDone"
}

%wrapped (p: bf16[4,8]) -> bf16[4,8] {
  %p.3 = bf16[4,8] parameter(0)
  ROOT %swap = bf16[4,8] all-to-all(%p.3), replica_groups={{0,1,2,3}}
}

ENTRY %main (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8] parameter(0)
  %scatter = f32[4,8] reduce-scatter(%a), replica_groups={{0,1,2,3}}
  %one = bf16[16,8] fusion(%a), kind=kCustom, calls=%start
  %two = bf16[16,8] fusion(%a), kind=kCustom, calls=%middle
  %three = bf16[16,8] fusion(%a), kind=kCustom, calls=%done
  %four = ((bf16[4,8]), bf16[4,8]) async-start(%a), calls=%wrapped
  %five = bf16[4,8] async-done(%four), calls=%wrapped
  %sum = (f32[8], f32[4]) all-reduce-start(%b, %c), replica_groups={{0,1,2,3}}
  %total = (f32[8], f32[4]) all-reduce-done(%sum)
  %both = ((f32[8], f32[4]), (f32[2], f32[1])) reduce-scatter-start(%b, %c), \
replica_groups={{0,1,2,3}}
  ROOT %parts = (f32[2], f32[1]) reduce-scatter-done(%both)
}
"""


def test_beginnings_and_ends_of_collectives():
    program = parse(TEXT)
    found = {
        x.name: find_collectives(program, x) for x in program.entry.instructions
    }
    (scatter,) = found["scatter"]
    assert (scatter.kind, scatter.key) == ("reduce-scatter", None)
    assert scatter.size == 4 * 4 * 8 * 4
    (one,) = found["one"]
    assert (one.kind, one.size, one.key) == ("all-gather", 256, "5")
    assert found["two"] == found["three"] == []
    (swap,) = found["four"]
    assert (swap.kind, swap.size, swap.key) == ("all-to-all", 64, "four")
    assert found["five"] == []
    (total,) = found["sum"]
    assert (total.kind, total.size, total.key) == ("all-reduce", 48, "sum")
    (both,) = found["both"]
    assert (both.kind, both.size, both.key) == ("reduce-scatter", 48, "both")
    assert {total.kind, one.kind, scatter.kind} <= set(COLLECTIVES)
    ends = {x.name: find_ends(program, x) for x in program.entry.instructions}
    assert {k: v for k, v in ends.items() if v} == {
        "three": ["5"],
        "five": ["four"],
        "total": ["sum"],
        "parts": ["both"],
    }
