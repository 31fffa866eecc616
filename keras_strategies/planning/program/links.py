"""Computes how long collectives use the links between chips."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_strategies.passes.hlo_text import (
    COLLECTIVES,
    Groups,
    count_bytes,
    parse_groups,
)
from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
)

# The number of times that a chip's links carry an array: 2 in an all-reduce,
# which sends it around a ring twice, and 1 in other collectives.
_PASSES = {"all-reduce": 2.0}
_CHAIN = re.compile(r'chain_id="?(\d+)')
_STARTED = 'custom_call_target="AsyncCollectiveStart"'
_DONE = 'custom_call_target="AsyncCollectiveDone"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: Its kind, such as "all-reduce".
      size: Bytes of the full array: the result of an all-gather, the reduced
        array of an all-reduce, or the sum before it is scattered.
      groups: The groups of devices, by their places in the program's mesh. For
        a collective-permute: pairs of a source and a target.
      key: If it is asynchronous: what its end is recognized by. None otherwise.
    """

    kind: str
    size: float
    groups: Groups
    key: str | None


def find_collectives(
    program: Program, instruction: Instruction
) -> list[Collective]:
    """Returns the collectives that an instruction performs or starts."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        is_started = kind != instruction.opcode
        key = instruction.name if is_started else None
        return [_make(instruction, kind, key)]
    inner = program.computations.get(instruction.get_called() or "")
    if instruction.opcode not in ("fusion", "async-start") or inner is None:
        return []
    found = list(_find_inside(inner))
    if instruction.opcode == "async-start":
        key = instruction.name
        return [dataclasses.replace(x, key=key) for x in found]
    return found


def find_ends(program: Program, instruction: Instruction) -> list[str]:
    """Returns the keys of the collectives for which an instruction waits."""
    if instruction.opcode.endswith("-done"):
        return list(instruction.operands[:1])
    inner = program.computations.get(instruction.get_called() or "")
    if instruction.opcode != "fusion" or inner is None:
        return []
    if not any(_DONE in x.attributes for x in inner.instructions):
        return []
    chains = (_CHAIN.search(x.attributes) for x in inner.instructions)
    return [match[1] for match in chains if match is not None]


def _find_inside(computation: Computation) -> Iterator[Collective]:
    started = {
        name
        for x in computation.instructions
        if _STARTED in x.attributes
        for name in x.operands
    }
    for instruction in computation.instructions:
        if instruction.opcode not in COLLECTIVES:
            continue
        chain = _CHAIN.search(instruction.attributes)
        if chain is None:
            yield _make(instruction, instruction.opcode, None)
        elif instruction.name in started:
            yield _make(instruction, instruction.opcode, chain[1])


def _make(instruction: Instruction, kind: str, key: str | None) -> Collective:
    opcode, attributes = instruction.opcode, instruction.attributes
    return Collective(
        kind=kind,
        size=float(count_bytes(opcode, instruction.result, attributes)),
        groups=parse_groups(attributes),
        key=key,
    )


def make_timer(
    chip: Chip, devices: Sequence[Any]
) -> Callable[[Collective], float]:
    """Returns a function that computes how long a collective uses the links.

    Args:
      chip: The chip's specifications.
      devices: The devices in the order of the program's mesh.
    """
    places = [getattr(d, "coords", None) for d in devices]
    slices = {getattr(d, "slice_index", 0) for d in devices}
    share = functools.cache(
        functools.partial(_find_share, chip.num_links, places)
    )
    # Between slices there are no links of chips.
    is_known = None not in places and len(slices) == 1

    def count_seconds(collective: Collective) -> float:
        members = len(collective.groups[0]) if collective.groups else 0
        sent = collective.size * _PASSES.get(collective.kind, 1.0)
        if members and collective.kind != "collective-permute":
            sent *= 1 - 1 / members
        part = 1.0
        if is_known and members > 1:
            part = share(collective.groups)
        return sent / (chip.link_bandwidth * part)

    return count_seconds


def _find_share(num_links: int, places: Sequence[Any], groups: Groups) -> float:
    """Returns the share of a chip's links that a collective can use.

    It is the share of the chip that has the fewest links to other chips of its
    group, which all others wait for. A link that leads to another chip of the
    group only through d - 1 others is shared with the groups of these chips.
    """
    ends = np.array([place for place in places])
    sizes = (ends.max(0) - ends.min(0) + 1).tolist()
    shares: list[float] = []
    for group in groups:
        members = {tuple(places[k]) for k in group}
        if len(members) > 1:
            shares += (
                _count_links(m, members, sizes, num_links) for m in members
            )
    return min(max(min(shares, default=1.0), 1 / num_links), 1.0)


def _count_links(
    place: tuple[int, ...],
    members: set[tuple[int, ...]],
    sizes: Sequence[int],
    num_links: int,
) -> float:
    """Returns the share of a chip's links that lead to its group."""
    total = 0.0
    for dim in range(len(sizes)):
        found = [
            _find_distance(place, members, sizes, num_links, dim, sign)
            for sign in (1, -1)
        ]
        # Around a ring, the long way is not used.
        shortest = min(found)
        total += found.count(shortest) / shortest
    return total / num_links


def _find_distance(
    place: tuple[int, ...],
    members: set[tuple[int, ...]],
    sizes: Sequence[int],
    num_links: int,
    dim: int,
    sign: int,
) -> float:
    """Returns the distance to the next chip of a group in one direction."""
    size = sizes[dim]
    for distance in range(1, size):
        at = place[dim] + sign * distance
        if not 0 <= at < size and not _is_ring(size, num_links):
            break
        if (*place[:dim], at % size, *place[dim + 1 :]) in members:
            return distance
    return math.inf


def _is_ring(size: int, num_links: int) -> bool:
    """Returns whether the chips along a dimension are connected in a ring.

    On 2-D slices, dimensions of 16 chips are rings; on 3-D slices, those of
    multiples of 4.
    """
    return size == 16 if num_links == 4 else size % 4 == 0
