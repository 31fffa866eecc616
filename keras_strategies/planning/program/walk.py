"""Adds up the costs of a compiled program's instructions, in their order."""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Protocol

from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
)
from keras_strategies.planning.program.links import (
    Collective,
    find_collectives,
    find_ends,
)
from keras_strategies.planning.program.loops import count_turns
from keras_strategies.planning.program.sources import (
    count_inner_loops,
    describe_source,
)
from keras_strategies.planning.program.work import Work, count_work

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SYNCHRONOUS = '"is_sync":true'

Totals = dict[tuple[str, str], float]
"""Sums by a name of a field, and by a kind or "" for fields without kinds."""


class Works:
    """Counts the work of each instruction of a program once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._found: dict[int, Work] = {}

    def count(self, computation: Computation, instruction: Instruction) -> Work:
        """Returns the work of an instruction; see `count_work`."""
        found = self._found.get(id(instruction))
        if found is None:
            found = count_work(self._program, computation, instruction)
            self._found[id(instruction)] = found
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """The time and the bytes of an instruction on a chip.

    Attributes:
      seconds: Its time.
      compute_seconds: The time of its operations at the chip's peak rate.
      moved_bytes: Bytes that it reads from and writes to the main memory.
      is_latency: Whether it has so little work that it takes the shortest
        possible time.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    moved_bytes: float = 0.0
    is_latency: bool = False


class Clock(Protocol):
    """Estimates the times of instructions and collectives on a chip."""

    def measure(
        self,
        computation: Computation,
        instruction: Instruction,
        work: Work,
        is_resident: bool,
    ) -> Spent:
        """Estimates the time of an instruction.

        Args:
          computation: The computation that contains it.
          instruction: The instruction.
          work: Its work.
          is_resident: Whether the computation's arrays are in on-chip memory.
        """
        ...

    def is_resident(self, body: Computation) -> bool:
        """Returns whether the arrays of a loop's body fit on the chip."""
        ...

    def measure_links(self, collective: Collective) -> tuple[float, float]:
        """Estimates the time of a collective.

        Returns:
          The seconds in which it sends its bytes at the links' bandwidth, and
          those that it takes.
        """
        ...


class Walk:
    """Adds up the costs of a program's instructions.

    Args:
      program: The program.
      works: The work of its instructions.
      clock: The times of its instructions.
    """

    def __init__(self, program: Program, works: Works, clock: Clock) -> None:
        self._program, self._works, self._clock = program, works, clock
        self._visited: dict[tuple[int, tuple[int, ...], bool], Totals] = {}

    def visit(
        self,
        computation: Computation,
        turns: tuple[int, ...],
        is_resident: bool = False,
    ) -> Totals:
        """Returns the costs of running a computation once.

        Args:
          computation: The computation.
          turns: The numbers of turns of the loops around it.
          is_resident: Whether its arrays are in on-chip memory.
        """
        key = id(computation), turns, is_resident
        if key not in self._visited:
            self._visited[key] = self._add_up(computation, turns, is_resident)
        return self._visited[key]

    def _add_up(
        self,
        computation: Computation,
        turns: tuple[int, ...],
        is_resident: bool,
    ) -> Totals:
        totals: Totals = collections.defaultdict(float)
        # How much longer started collectives use the links, in their order.
        pending: dict[str, tuple[str, float]] = {}
        for instruction in computation.instructions:
            found = self._visit_one(
                computation, instruction, turns, is_resident
            )
            _add(totals, found, 1)
            for key in find_ends(self._program, instruction):
                for other in _until(pending, key):
                    kind, rest = pending.pop(other)
                    totals["waiting_seconds", kind] += rest
            busy = found.get(("busy_seconds", ""), 0.0)
            _cover(pending, busy)
            is_awaited = _SYNCHRONOUS in instruction.attributes
            for collective in find_collectives(self._program, instruction):
                if is_awaited:
                    collective = dataclasses.replace(collective, key=None)
                self._add_collective(totals, collective, busy, pending)
        return totals

    def _add_collective(
        self,
        totals: Totals,
        collective: Collective,
        busy: float,
        pending: dict[str, tuple[str, float]],
    ) -> None:
        kind = collective.kind
        least, seconds = self._clock.measure_links(collective)
        totals["counts", kind] += 1
        totals["sent", kind] += collective.size
        totals["link_seconds", kind] += least
        if collective.key is None:
            totals["waiting_seconds", kind] += max(seconds - busy, 0.0)
        else:
            pending[collective.key] = kind, seconds

    def _visit_one(
        self,
        computation: Computation,
        instruction: Instruction,
        turns: tuple[int, ...],
        is_resident: bool,
    ) -> Totals:
        if instruction.opcode == "while":
            return self._visit_loop(computation, instruction, turns)
        called = _list_called(instruction)
        if called:
            found = [
                self.visit(self._program.computations[name], turns, is_resident)
                for name in called
            ]
            return max(found, key=lambda x: x.get(("busy_seconds", ""), 0.0))
        work = self._works.count(computation, instruction)
        kernel_flops = work.kernel_flops
        for number in turns[len(turns) - count_inner_loops(instruction) :]:
            kernel_flops /= max(number, 1)
        work = dataclasses.replace(work, kernel_flops=kernel_flops)
        spent = self._clock.measure(computation, instruction, work, is_resident)
        seconds = spent.seconds
        if instruction.opcode.endswith("-start"):
            # It runs beside other instructions.
            seconds = 0.0
        return {
            ("flops", ""): work.flops + kernel_flops,
            ("kernel_flops", ""): kernel_flops,
            ("compute_seconds", ""): spent.compute_seconds,
            ("moved_bytes", ""): spent.moved_bytes,
            ("busy_seconds", ""): seconds,
            ("latency_seconds", ""): seconds if spent.is_latency else 0.0,
            ("dearest", describe_source(instruction)): seconds,
        }

    def _visit_loop(
        self,
        computation: Computation,
        loop: Instruction,
        turns: tuple[int, ...],
    ) -> Totals:
        body = self._program.computations[loop.get_called("body") or ""]
        number = count_turns(self._program, computation, loop)
        of_turn = self.visit(
            body, (*turns, number or 1), self._clock.is_resident(body)
        )
        totals: Totals = collections.defaultdict(float)
        if number is None:
            busy = of_turn.get(("busy_seconds", ""), 0.0)
            totals["endless", describe_source(loop)] += busy
        _add(totals, of_turn, 1 if number is None else number)
        return totals


def _add(totals: Totals, more: Totals, times: float) -> None:
    for key, number in more.items():
        totals[key] += number * times


def _cover(pending: dict[str, tuple[str, float]], seconds: float) -> None:
    """Shortens what is left of collectives beside which others run."""
    for key, (kind, rest) in pending.items():
        used = min(rest, seconds)
        pending[key] = kind, rest - used
        seconds -= used


def _until(pending: Mapping[str, object], key: str) -> list[str]:
    """Returns the keys up to `key`, or none if it is absent."""
    keys = list(pending)
    return keys[: keys.index(key) + 1] if key in pending else []


def _list_called(instruction: Instruction) -> list[str]:
    """Returns the computations of a call, or the branches of a conditional."""
    if instruction.opcode == "call":
        return [name for name in [instruction.get_called("to_apply")] if name]
    if instruction.opcode != "conditional":
        return []
    listed = _BRANCHES.search(instruction.attributes)
    if listed is not None:
        return re.findall(r"[\w.\-]+", listed[1])
    names = map(
        instruction.get_called, ("true_computation", "false_computation")
    )
    return [name for name in names if name]
