"""Estimates what a compiled program costs: operations, bytes and seconds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.gpu_clock import GpuClock
from keras_strategies.planning.program.hlo import parse
from keras_strategies.planning.program.tpu_clock import TpuClock
from keras_strategies.planning.program.walk import (
    Clock,
    Totals,
    Walk,
    Works,
)
from keras_strategies.spmd.compiled import Figures

_MOST_DEAREST = 4
_UNREADABLE = (ArithmeticError, LookupError, RecursionError, ValueError)
"""Errors of parsing a text that a later compiler writes in another form."""
_LONGEST_ERROR = 200

_NUMBERS = (
    *("flops", "kernel_flops", "compute_seconds", "moved_bytes"),
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
      compute_seconds: The time of all these operations at the chip's peak rate
        for their dtypes.
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
    compute_seconds: float
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
    is_gpu = bool(devices) and devices[0].platform == "gpu"
    program = parse(text, is_tiled=not is_gpu)
    works = Works(program)
    if is_gpu:
        clock: Clock = GpuClock(chip, devices)
    else:
        clock = TpuClock(chip, devices, works)
    return _make_facts(Walk(program, works, clock).visit(program.entry, ()))


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
