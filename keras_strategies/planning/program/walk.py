"""Adds up the costs of a compiled program's instructions, in their order.

XLA's own estimate of an instruction (`optimal_seconds`) is the longer one of
the times for operations and for bytes. This module does the same, and also
counts what XLA leaves out (libtpu 0.0.42): links, attention's kernels, and the
time that an instruction takes however small it is. For gathers, XLA counts the
padding of the result, too. XLA chooses the kernels of products, convolutions
and attention for a GPU only on a GPU, by measuring them.
"""

import collections
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.planning.program.links import find_ends, make_timer
from keras_strategies.planning.program.work import Work, count_work, locate
from keras_strategies.planning.seam import (
    chips,
    compiled,
    hlo,
)

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SYNCHRONOUS = '"is_sync":true'
_KERNEL_SHARE = 0.5
"""The share of the peak rate that attention's kernels are assumed to reach.

XLA does not estimate their time.
"""
_CONVOLUTION_SHARE = 0.55
"""The share of the peak rate, or of the bandwidth, that convolutions reach on a
GPU."""
_ON_CHIP_SPEED = 6.5
"""The bandwidth of on-chip memory, as a multiple of the main memory's. XLA's
cycles of products of (16, 2048) by (2048, 8192) in on-chip memory."""
_RESIDENT = 0.8
"""The share of on-chip memory that arrays may fill. At full effort, XLA places
those of a loop's body there for all iterations. Measured up to 100 of 128 MiB.
"""

Totals = dict[tuple[str, str], float]
"""Sums by the name of a field of `Costs`, and by a kind or source; "" for
fields without kinds."""


class Walk:
    """Adds up the costs of a program's instructions.

    Args:
      program: The program.
      chip: The chip that it runs on.
      devices: The devices in the order of the program's mesh.
    """

    def __init__(
        self, program: hlo.Program, chip: chips.Chip, devices: Sequence[Any]
    ) -> None:
        self._program, self._chip = program, chip
        self._measure_links = make_timer(chip, devices)
        # A computation may be called often.
        self.visit = functools.cache(self._visit)
        self._count_works = functools.cache(self._count_all_works)

    def _visit(self, computation: hlo.Computation, is_resident: bool) -> Totals:
        """Returns the costs of running a computation once.

        Args:
          computation: The computation.
          is_resident: Whether all of its arrays are in on-chip memory.
        """
        totals: Totals = collections.defaultdict(float)
        resident = None if is_resident else self._find_resident(computation)
        # How much longer started collectives use the links, in their order.
        pending: dict[str, tuple[str, float]] = {}
        for x in computation.instructions:
            found = self._visit_instruction(computation, x, resident)
            _add(totals, found, 1)
            for key in find_ends(self._program, x):
                while key in pending:
                    kind, rest = pending.pop(next(iter(pending)))
                    totals["waiting_seconds", kind] += rest
            busy = rest = found.get(("busy_seconds", ""), 0.0)
            # Other instructions hide collectives.
            for key, (kind, left) in pending.items():
                pending[key] = kind, max(left - rest, 0.0)
                rest = max(rest - left, 0.0)
            inner = self._program.find_called(x)
            parts = [x] if inner is None else inner.instructions
            for part in parts:
                for sent in hlo.find_collective(inner or computation, part):
                    minimum, seconds = self._measure_links(sent)
                    totals["counts", sent.kind] += 1
                    totals["sent", sent.kind] += sent.size
                    totals["link_seconds", sent.kind] += minimum
                    is_start = x.opcode in ("async-start", "call-start")
                    key = x.name if is_start else sent.key
                    if key is None or _SYNCHRONOUS in x.attributes:
                        waiting = max(seconds - busy, 0.0)
                        totals["waiting_seconds", sent.kind] += waiting
                    else:
                        pending[key] = sent.kind, seconds
        return totals

    def _visit_instruction(
        self,
        computation: hlo.Computation,
        x: hlo.Instruction,
        resident: frozenset[str] | None,
    ) -> Totals:
        if x.opcode == "while":
            return self._visit_loop(computation, x)
        if called := _list_called(x):
            found = [
                self.visit(self._program.computations[name], resident is None)
                for name in called
            ]
            return max(found, key=lambda x: x.get(("busy_seconds", ""), 0.0))
        work = self._count_works(computation)[x.name]
        costs = measure(self._chip, work, resident)
        if x.opcode.endswith("-start"):
            # It runs beside other instructions.
            costs["busy_seconds", ""] = 0.0
        costs["top_operations", compiled.describe_source(x)] = costs[
            "busy_seconds", ""
        ]
        return costs

    def _visit_loop(
        self, computation: hlo.Computation, loop: hlo.Instruction
    ) -> Totals:
        body = self._program.computations[loop.get_called("body") or ""]
        number = count_iterations(self._program, computation, loop)
        sizes: dict[str, float] = {}
        for work in self._count_works(body).values():
            sizes |= {**work.read, **work.written}
        limit = _RESIDENT * self._chip.on_chip_bytes
        once = self.visit(body, sum(sizes.values()) < limit)
        totals: Totals = collections.defaultdict(float)
        _add(totals, once, 1 if number is None else number)
        if number is None:
            busy = once.get(("busy_seconds", ""), 0.0)
            totals["unknown_loops", compiled.describe_source(loop)] += busy
        return totals

    def _count_all_works(
        self, computation: hlo.Computation
    ) -> Mapping[str, Work]:
        is_tiled = self._chip.on_chip_bytes > 0
        return {
            x.name: count_work(self._program, computation, x, is_tiled=is_tiled)
            for x in computation.instructions
        }

    def _find_resident(self, computation: hlo.Computation) -> frozenset[str]:
        """Returns which arrays a program for training has on the chip.

        At full effort, the program's text tells it instead. At low effort, XLA
        keeps no results in on-chip memory. It is assumed to keep those that are
        soon used again: the product of their bytes and of the number of
        instructions until their last use must not exceed that memory, so that
        all of them fill it on average at most.
        """
        works = self._count_works(computation)
        if any(work.on_chip for work in works.values()):
            return frozenset()
        limit = _RESIDENT * self._chip.on_chip_bytes
        last = {
            name: place
            for place, work in enumerate(works.values())
            for name in work.read
        }
        # The state of a loop, or the results.
        kept = {locate(computation, computation.root.name)} | {
            locate(computation, name)
            for x in computation.instructions
            if x.opcode in ("tuple", "while")
            for name in x.operands
        }
        return frozenset(
            name
            for place, work in enumerate(works.values())
            for name, size in work.written.items()
            if name not in kept
            and size * (last.get(name, math.inf) - place) <= limit
        )


def measure(
    chip: chips.Chip, work: Work, resident: frozenset[str] | None = frozenset()
) -> Totals:
    """Estimates the time of an instruction from its operations and bytes.

    Args:
      chip: The chip that it runs on.
      work: The work of the instruction.
      resident: The names of arrays in on-chip memory. None for all arrays.
    """
    slow, fast = work.parts, work.on_chip
    for sizes in (work.read, work.written):
        for name, size in sizes.items():
            if resident is None or name in resident:
                fast += size
            else:
                slow += size
    kernels = work.kernel_flops / chip.flops
    products = sum(
        n / chip.find_flops(dtype) for dtype, n in work.products.items()
    )
    integers = work.integers / chip.integer_ops
    memory = (slow + fast / _ON_CHIP_SPEED) / chip.memory_bandwidth
    if work.is_convolution:
        busy = max(products, memory) / _CONVOLUTION_SHARE
    else:
        busy = max(
            products / chip.product_share + kernels / _KERNEL_SHARE + integers,
            memory / chip.memory_share,
        )
    seconds = max(busy, chip.min_seconds) if slow or fast else 0.0
    is_latency = seconds == chip.min_seconds
    costs = {
        "flops": work.flops + work.kernel_flops,
        "kernel_flops": work.kernel_flops,
        "compute_seconds": products + kernels + integers,
        "moved_bytes": slow,
        "busy_seconds": seconds,
        "latency_seconds": seconds if is_latency else 0.0,
    }
    return {(name, ""): number for name, number in costs.items()}


def _add(totals: Totals, more: Totals, times: float) -> None:
    for key, number in more.items():
        totals[key] += number * times


def _list_called(instruction: hlo.Instruction) -> list[str]:
    """Returns the computations of a call, or the branches of a conditional."""
    if instruction.opcode == "conditional":
        listed = _BRANCHES.search(instruction.attributes)
        if listed is not None:
            return re.findall(r"[\w.\-]+", listed[1])
    keys = {
        "call": ("to_apply",),
        "conditional": ("true_computation", "false_computation"),
    }.get(instruction.opcode, ())
    return [name for name in map(instruction.get_called, keys) if name]


_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_INDEX = re.compile(r"index=(\d+)")


def count_iterations(
    program: hlo.Program, computation: hlo.Computation, loop: hlo.Instruction
) -> int | None:
    """Returns the number of iterations of a `while` instruction.

    XLA's text contains the number only for some programs. Otherwise it is
    computed for a loop that counts up from a constant to a constant.

    Args:
      program: The program.
      computation: The computation that contains the loop.
      loop: The `while` instruction.

    Returns:
      The number of iterations, or None if it depends on values.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = program.computations[loop.get_called("condition") or ""]
    body = program.computations[loop.get_called("body") or ""]
    state = computation.by_name[loop.operands[0]]
    compared = condition.root
    direction = _DIRECTION.search(compared.attributes)
    is_less = {"LT": 0, "LE": 1}.get(direction[1] if direction else "")
    if compared.opcode != "compare" or is_less is None:
        return None
    if not state.opcode == body.root.opcode == "tuple":
        return None
    counter, last = (_resolve(condition, x) for x in compared.operands)
    if counter is None or counter[0] is None or last is None:
        return None
    first = _resolve(computation, state.operands[counter[0]])
    step = _resolve(body, body.root.operands[counter[0]])
    if last[0] is not None:
        # The limit must be an element of the state that the body keeps.
        if _resolve(body, body.root.operands[last[0]]) != (last[0], 0):
            return None
        last = _resolve(computation, state.operands[last[0]])
    if first is None or last is None or step is None or step[0] != counter[0]:
        return None
    if first[0] is not None or last[0] is not None or step[1] <= 0:
        return None
    return max(-(-(last[1] + is_less - first[1]) // step[1]), 0)


def _resolve(
    computation: hlo.Computation, name: str
) -> tuple[int | None, int] | None:
    """Returns an element of the state and the constant that is added to it.

    The element is None for a constant. Returns None for all other values.
    """
    x = computation.by_name[name]
    if x.opcode == "constant" and x.literal.lstrip("-").isdecimal():
        return None, int(x.literal)
    if x.opcode in ("copy", "bitcast", "convert"):
        return _resolve(computation, x.operands[0])
    if x.opcode == "get-tuple-element":
        is_state = computation.by_name[x.operands[0]].opcode == "parameter"
        index = _INDEX.search(x.attributes)
        return (int(index[1]), 0) if is_state and index else None
    if x.opcode != "add":
        return None
    terms = [_resolve(computation, operand) for operand in x.operands]
    places = {place for place, _ in filter(None, terms)} - {None}
    if None in terms or len(places) > 1:
        return None
    return next(iter(places), None), sum(n for _, n in filter(None, terms))
