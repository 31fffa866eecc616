"""Computes how long collectives use NVLink and the network between hosts."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from keras_strategies.passes.hlo_text import Groups
from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.links import Collective

_REACHED = 0.8
_START_SECONDS = 4e-5
"""The share of the bandwidth that NCCL reaches, and the time of a collective
with little data. They are within 20 percent of XLA's estimates for eight H100s:
42 us for an all-reduce of 37 KB, 380 us for one of 67 MB."""


class Network:
    """The links of GPUs: NVLink within a host, and a network between hosts.

    Args:
      chip: The GPU.
      devices: The devices in the order of the program's mesh.
    """

    def __init__(self, chip: Chip, devices: Sequence[Any]) -> None:
        self._chip = chip
        self._hosts = [d.process_index for d in devices]
        self._describe = functools.cache(self._count_members)

    def measure(self, collective: Collective) -> tuple[float, float]:
        """Estimates the time of a collective; see `Clock.measure_links`."""
        inside, outside = self._find_bytes(collective)
        chip = self._chip
        least = max(
            inside / chip.link_bandwidth, outside / chip.network_bandwidth
        )
        return least, least / _REACHED + _START_SECONDS if least else 0.0

    def _find_bytes(self, collective: Collective) -> tuple[float, float]:
        """Returns the bytes that a GPU sends in its host, and to others."""
        kind, size = collective.kind, collective.size
        if kind == "collective-permute":
            hosts = self._hosts
            is_inside = all(hosts[a] == hosts[b] for a, b in collective.groups)
            return (size, 0.0) if is_inside else (0.0, size)
        members, of_host, hosts = self._describe(collective.groups)
        if kind == "all-to-all":
            return size * (of_host - 1) / members, size * (
                1 - of_host / members
            )
        passes = 2.0 if kind == "all-reduce" else 1.0
        # A ring through all GPUs enters and leaves each host once. The GPUs of
        # a host share the bytes that leave it.
        outside = size * passes * (1 - 1 / hosts) / of_host
        inside = size * passes * (1 - 1 / members) if of_host > 1 else 0.0
        return inside, outside

    def _count_members(self, groups: Groups) -> tuple[int, int, int]:
        """Returns how many GPUs and hosts a group has, and GPUs of a host."""
        group = groups[0] if groups else range(len(self._hosts))
        counts = Counter(self._hosts[k] for k in group)
        return len(group), min(counts.values()), len(counts)
