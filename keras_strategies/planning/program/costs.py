"""Estimates what a compiled program costs: operations, bytes and seconds.

XLA's own estimate (`optimal_seconds`) adds up, for all instructions, the longer
one of the times for operations and for bytes. This module does the same, and
also counts what XLA leaves out (libtpu 0.0.42): the turns of loops, links,
attention's kernels, and the time that an instruction takes however small it
is. For gathers, XLA counts the padding of the result, too.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from keras_strategies._core.compiled import Figures
from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
    parse,
)
from keras_strategies.planning.program.links import (
    Collective,
    find_collectives,
    find_ends,
    make_timer,
)
from keras_strategies.planning.program.loops import count_turns
from keras_strategies.planning.program.residency import choose_resident
from keras_strategies.planning.program.sources import (
    count_inner_loops,
    describe_source,
)
from keras_strategies.planning.program.work import Work, count_work

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
_KERNEL_UTILIZATION = 0.5
"""The share of the peak rate that attention's kernels are assumed to reach.

XLA does not estimate their time.
"""
_MOST_DEAREST = 4
_UNREADABLE = (ArithmeticError, LookupError, RecursionError, ValueError)
"""Errors of parsing a text that a later compiler writes in another form."""
_LONGEST_ERROR = 200
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

Totals = dict[tuple[str, str], float]
"""Sums by a name of a field, and by a kind or "" for fields without kinds."""
_NUMBERS = (
    *("flops", "kernel_flops", "moved_bytes"),
    *("busy_seconds", "latency_seconds"),
)
BY_KIND = ("counts", "sent", "link_seconds", "waiting_seconds")
BY_SOURCE = ("dearest", "endless")
"""Fields of `Costs` that are mappings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs(Figures):
    """The costs of a compiled program on each device.

    All numbers are those of the whole program, in which a loop's body counts as
    often as it runs. Without specifications of the chip, all are 0 except for
    those of `Figures`.

    Attributes:
      code_bytes: Bytes of the program itself in the device's memory.
      flops: Number of multiplications and additions in matrix products,
        convolutions and attention's kernels.
      kernel_flops: Those of attention's kernels.
      moved_bytes: Bytes that are read from and written to the main memory.
      busy_seconds: The time of all instructions, without waiting for links.
      latency_seconds: The time of the instructions with so little work that
        they take the shortest possible time.
      link_seconds: For each kind of collective, the time in which they use the
        links.
      waiting_seconds: The part of it in which no other instruction runs.
      dearest: The time of the operations that take longest, by a description.
      endless: For each loop whose number of turns is unknown, the time of the
        one turn that is counted.
      unread: If the program's text has an unknown form: the error that parsing
        it raised. The numbers are then as if the chip were unknown. "" if the
        text was parsed.
    """

    code_bytes: float
    flops: float
    kernel_flops: float
    moved_bytes: float
    busy_seconds: float
    latency_seconds: float
    link_seconds: Mapping[str, float]
    waiting_seconds: Mapping[str, float]
    dearest: Mapping[str, float]
    endless: Mapping[str, float]
    unread: str = ""

    @property
    def bytes_in_all(self) -> float:
        """The bytes of memory that the program needs on each device."""
        return super().bytes_in_all + self.code_bytes

    @classmethod
    def measure(
        cls,
        executable: Any,
        seconds: float,
        chip: Chip | None = None,
        devices: Sequence[Any] = (),
    ) -> Self:
        """Computes the costs of a compiled program.

        Args:
          executable: A `jax.stages.Compiled`.
          seconds: The time that it took to compile the program.
          chip: The chip that it runs on, or None if its specifications are
            unknown.
          devices: The devices in the order of the program's mesh.
        """
        figures = Figures.measure(executable, seconds)
        code = executable.memory_analysis().generated_code_size_in_bytes
        facts: dict[str, Any] = {
            field.name: getattr(figures, field.name)
            for field in dataclasses.fields(figures)
        }
        facts = _make_facts({}) | facts
        if chip is not None:
            try:
                facts |= estimate_work(executable.as_text(), chip, devices)
            except _UNREADABLE as error:
                text = f"{type(error).__name__}: {error}"
                facts["unread"] = text[:_LONGEST_ERROR]
        return cls(**facts | {"code_bytes": code})


def estimate_work(
    text: str, chip: Chip, devices: Sequence[Any]
) -> dict[str, Any]:
    """Returns the fields of `Costs` that are computed from a program's text."""
    program = parse(text)
    return _make_facts(_Walk(program, chip, devices).visit(program.entry, ()))


def _make_facts(totals: Totals) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: totals.get((name, ""), 0.0) for name in _NUMBERS
    }
    for name in (*BY_KIND, *BY_SOURCE):
        found = {
            key: n for (field, key), n in totals.items() if field == name and n
        }
        facts[name] = found
    longest = sorted(facts["dearest"].items(), key=lambda x: x[1])[::-1]
    facts["dearest"] = dict(longest[:_MOST_DEAREST])
    facts["endless"] = dict(list(facts["endless"].items())[:_MOST_DEAREST])
    return facts


class _Walk:
    """Adds up the costs of a program's instructions."""

    def __init__(
        self, program: Program, chip: Chip, devices: Sequence[Any]
    ) -> None:
        self._program, self._chip = program, chip
        self._works: dict[int, Work] = {}
        self._visited: dict[tuple[int, tuple[int, ...], bool], Totals] = {}
        self._resident: dict[int, frozenset[str]] = {}
        self._time: Callable[[Collective], float] = make_timer(chip, devices)

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
            for collective in find_collectives(self._program, instruction):
                self._add_collective(totals, collective, busy, pending)
        return totals

    def _add_collective(
        self,
        totals: Totals,
        collective: Collective,
        busy: float,
        pending: dict[str, tuple[str, float]],
    ) -> None:
        kind, seconds = collective.kind, self._time(collective)
        totals["counts", kind] += 1
        totals["sent", kind] += collective.size
        totals["link_seconds", kind] += seconds
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
        work = self._count_work(computation, instruction)
        kernel_flops = work.kernel_flops
        for number in turns[len(turns) - count_inner_loops(instruction) :]:
            kernel_flops /= max(number, 1)
        resident = None if is_resident else self._find_resident(computation)
        slow, fast = _divide_bytes(work, resident)
        seconds = self._count_seconds(work.flops, kernel_flops, slow, fast)
        if instruction.opcode.endswith("-start"):
            # It runs beside other instructions.
            seconds = 0.0
        latency = seconds if seconds == _LEAST_SECONDS else 0.0
        return {
            ("flops", ""): work.flops + kernel_flops,
            ("kernel_flops", ""): kernel_flops,
            ("moved_bytes", ""): slow,
            ("busy_seconds", ""): seconds,
            ("latency_seconds", ""): latency,
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
            body, (*turns, number or 1), self._is_resident(body)
        )
        totals: Totals = collections.defaultdict(float)
        if number is None:
            busy = of_turn.get(("busy_seconds", ""), 0.0)
            totals["endless", describe_source(loop)] += busy
        _add(totals, of_turn, 1 if number is None else number)
        return totals

    def _count_work(
        self, computation: Computation, instruction: Instruction
    ) -> Work:
        found = self._works.get(id(instruction))
        if found is None:
            found = count_work(self._program, computation, instruction)
            self._works[id(instruction)] = found
        return found

    def _is_resident(self, body: Computation) -> bool:
        """Returns whether the arrays of a loop's body fit on the chip."""
        sizes: dict[str, float] = {}
        for instruction in body.instructions:
            work = self._count_work(body, instruction)
            sizes |= {**work.read, **work.written}
        return sum(sizes.values()) < _RESIDENT * self._chip.on_chip_bytes

    def _find_resident(self, computation: Computation) -> frozenset[str]:
        """Returns which arrays a program for training has on the chip.

        At full effort, the program's text tells it instead.
        """
        found = self._resident.get(id(computation))
        if found is None:
            works = {
                x.name: self._count_work(computation, x)
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

    def _count_seconds(
        self, flops: float, kernel_flops: float, slow: float, fast: float
    ) -> float:
        if not (slow or fast):
            return 0.0
        chip = self._chip
        compute = (flops + kernel_flops / _KERNEL_UTILIZATION) / chip.flops
        memory = (slow + fast / _FASTER) / chip.memory_bandwidth / _REACHED
        return max(compute, memory, _LEAST_SECONDS)


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
