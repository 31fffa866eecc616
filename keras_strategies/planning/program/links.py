"""Computes how long collectives use the links between chips, or networks."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_strategies.planning.seam import (
    chips,
    hlo,
)

_PASSES = {"all-reduce": 2.0}
"""The number of times that a ring of chips carries an array: 2 in an all-reduce
and 1 in other collectives."""
_NCCL_SHARE = 0.8
_NCCL_SECONDS = 4e-5
"""The share of the bandwidth that NCCL reaches, and the time of a collective
with little data. They are within 20 percent of XLA's estimates for eight H100s:
42 us for an all-reduce of 37 KB, 380 us for one of 67 MB."""

_DONE = 'custom_call_target="AsyncCollectiveDone"'

Timer = Callable[[hlo.Collective], tuple[float, float]]
"""Returns the seconds in which a collective sends its bytes at the links'
bandwidth, and those that it takes."""


def find_ends(program: hlo.Program, instruction: hlo.Instruction) -> list[str]:
    """Returns the keys of the collectives for which an instruction waits."""
    if instruction.opcode.endswith("-done"):
        return list(instruction.operands[:1])
    inner = program.find_called(instruction)
    if inner is None or not any(
        _DONE in x.attributes for x in inner.instructions
    ):
        return []
    chains = (hlo.CHAIN.search(x.attributes) for x in inner.instructions)
    return [match[1] for match in chains if match is not None]


def make_timer(chip: chips.Chip, devices: Sequence[Any]) -> Timer:
    """Returns a function that computes how long a collective uses the links.

    Args:
      chip: The chip's specifications.
      devices: The devices in the order of the program's mesh.
    """
    if devices and devices[0].platform == "gpu":
        hosts = [d.process_index for d in devices]
        return functools.partial(_measure_gpus, chip, hosts)
    places = [getattr(d, "coords", None) for d in devices]
    slices = {getattr(d, "slice_index", 0) for d in devices}
    # Between slices there are no links of chips.
    is_known = None not in places and len(slices) == 1
    find_share = functools.cache(
        functools.partial(_find_share, chip.num_links, places)
    )

    def measure(collective: hlo.Collective) -> tuple[float, float]:
        members = len(collective.groups[0]) if collective.groups else 0
        sent = collective.size * _PASSES.get(collective.kind, 1.0)
        if members and collective.kind != "collective-permute":
            sent *= 1 - 1 / members
        share = 1.0
        if is_known and members > 1:
            share = find_share(collective.groups)
        seconds = sent / (chip.link_bandwidth * share)
        return seconds, seconds

    return measure


def _measure_gpus(
    chip: chips.Chip, hosts: Sequence[int], collective: hlo.Collective
) -> tuple[float, float]:
    """Implements `Timer` for NVLink in hosts and a network between them."""
    kind, size = collective.kind, collective.size
    members, host_devices, num_hosts = _count_members(
        tuple(hosts), collective.groups[:1]
    )
    if kind == "collective-permute":
        pairs = collective.groups
        is_inside = all(hosts[a] == hosts[b] for a, b in pairs)
        inside, outside = (size, 0.0) if is_inside else (0.0, size)
    elif kind == "all-to-all":
        inside = size * (host_devices - 1) / members
        outside = size * (1 - host_devices / members)
    else:
        passes = _PASSES.get(kind, 1.0)
        # A ring through all GPUs enters and leaves each host once. The GPUs of
        # a host share the bytes that leave it.
        outside = size * passes * (1 - 1 / num_hosts) / host_devices
        inside = size * passes * (1 - 1 / members) if host_devices > 1 else 0.0
    minimum = max(
        inside / chip.link_bandwidth, outside / chip.network_bandwidth
    )
    return minimum, minimum / _NCCL_SHARE + _NCCL_SECONDS if minimum else 0.0


@functools.lru_cache(maxsize=256)
def _count_members(
    hosts: tuple[int, ...], groups: hlo.Groups
) -> tuple[int, int, int]:
    """Returns how many GPUs a group has, GPUs of a host, and hosts."""
    group = groups[0] if groups else range(len(hosts))
    counts = Counter(hosts[k] for k in group)
    return len(group), min(counts.values()), len(counts)


def _find_share(
    num_links: int, places: Sequence[Any], groups: hlo.Groups
) -> float:
    """Returns the share of a chip's links that a collective can use.

    It is the share of the chip that has the fewest links to other chips of its
    group, which all others wait for: along each dimension one, or two if the
    group is a whole ring. A link that leads to another chip of the group only
    through d - 1 others is shared with the groups of these chips.
    """
    ends = np.array(places)
    sizes = (ends.max(0) - ends.min(0) + 1).tolist()
    shares = [1.0]
    for group in groups:
        total = 0.0
        for size, column in zip(sizes, ends[list(group)].T, strict=True):
            found = np.unique(column)
            if len(found) == 1:
                continue
            distance = float(found[-1] - found[0]) / (len(found) - 1)
            is_whole = len(found) * distance == size
            is_closed = is_whole and _is_ring(size, num_links)
            total += (2 if is_closed else 1) / distance
        # The two cores of a chip are in the same place.
        shares.append(total / num_links if total else 1.0)
    return max(min(shares), 1 / num_links)


def _is_ring(size: int, num_links: int) -> bool:
    """Returns whether the chips along a dimension are connected in a ring.

    On 2-D slices, dimensions of 16 chips are rings; on 3-D slices, those of
    multiples of 4.
    """
    return size == 16 if num_links == 4 else size % 4 == 0
