"""Estimates how long a TPU takes for an instruction or a collective.

XLA's own estimate (`optimal_seconds`) is the longer one of the times for
operations and for bytes. This module does the same, and also counts what XLA
leaves out (libtpu 0.0.42): links, attention's kernels, and the time that an
instruction takes however small it is. For gathers, XLA counts the padding of
the result, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.hlo import Computation, Instruction
from keras_strategies.planning.program.links import Collective, make_timer
from keras_strategies.planning.program.residency import choose_resident
from keras_strategies.planning.program.walk import Spent, Works
from keras_strategies.planning.program.work import Work

_LEAST_SECONDS = 1.2e-6
"""The time of an instruction with little work. In programs compiled at full
effort, XLA estimates 1,500 to 2,400 cycles of 0.67 ns for most of them."""
_REACHED = 0.9
"""The share of the memory's bandwidth that XLA's estimates assume."""
_FASTER = 6.5
"""The bandwidth of on-chip memory, as a multiple of the main memory's. XLA's
cycles of products of (16, 2048) by (2048, 8192) in on-chip memory."""
_RESIDENT = 0.8
"""The share of on-chip memory that the arrays of a loop's body may fill. At
full effort, XLA then places them there for all turns. Measured up to 100 of
128 MiB."""
KERNEL_UTILIZATION = 0.5
"""The share of the peak rate that attention's kernels are assumed to reach.

XLA does not estimate their time.
"""


class TpuClock:
    """Implements `Clock` for TPUs.

    Args:
      chip: The chip.
      devices: The devices in the order of the program's mesh.
      works: The work of the program's instructions.
    """

    def __init__(
        self, chip: Chip, devices: Sequence[Any], works: Works
    ) -> None:
        self._chip, self._works = chip, works
        self._resident: dict[int, frozenset[str]] = {}
        self._time: Callable[[Collective], float] = make_timer(chip, devices)

    def measure(
        self,
        computation: Computation,
        instruction: Instruction,
        work: Work,
        is_resident: bool,
    ) -> Spent:
        """Implements `Clock.measure`."""
        chip = self._chip
        resident = None if is_resident else self._find_resident(computation)
        slow, fast = _divide_bytes(work, resident)
        compute = (work.flops + work.kernel_flops) / chip.flops
        if not (slow or fast):
            return Spent(compute_seconds=compute)
        extra = work.kernel_flops * (1 / KERNEL_UTILIZATION - 1) / chip.flops
        memory = (slow + fast / _FASTER) / chip.memory_bandwidth / _REACHED
        seconds = max(compute + extra, memory, _LEAST_SECONDS)
        return Spent(
            seconds=seconds,
            compute_seconds=compute,
            moved_bytes=slow,
            is_latency=seconds == _LEAST_SECONDS,
        )

    def measure_links(self, collective: Collective) -> tuple[float, float]:
        """Implements `Clock.measure_links`."""
        seconds = self._time(collective)
        return seconds, seconds

    def is_resident(self, body: Computation) -> bool:
        """Implements `Clock.is_resident`."""
        sizes: dict[str, float] = {}
        for instruction in body.instructions:
            work = self._works.count(body, instruction)
            sizes |= {**work.read, **work.written}
        return sum(sizes.values()) < _RESIDENT * self._chip.on_chip_bytes

    def _find_resident(self, computation: Computation) -> frozenset[str]:
        """Returns which arrays a program for training has on the chip.

        At full effort, the program's text tells it instead.
        """
        found = self._resident.get(id(computation))
        if found is None:
            works = {
                x.name: self._works.count(computation, x)
                for x in computation.instructions
            }
            found = frozenset[str]()
            if not any(work.on_chip for work in works.values()):
                found = choose_resident(
                    computation,
                    {name: work.written for name, work in works.items()},
                    _RESIDENT * self._chip.on_chip_bytes,
                )
            self._resident[id(computation)] = found
        return found


def _divide_bytes(
    work: Work, resident: frozenset[str] | None
) -> tuple[float, float]:
    """Returns the bytes in main memory and those in on-chip memory.

    Args:
      work: The work of an instruction.
      resident: The names of arrays in on-chip memory. None for all arrays.
    """
    slow, fast = work.parts, work.on_chip
    for sizes in (work.read, work.written):
        for name, size in sizes.items():
            if resident is None or name in resident:
                fast += size
            else:
                slow += size
    return slow, fast
