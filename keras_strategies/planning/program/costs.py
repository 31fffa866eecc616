"""Estimates what a compiled program costs: operations, bytes and seconds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_strategies.planning.program.walk import Walk
from keras_strategies.planning.seam import (
    chips,
    compiled,
    hlo,
)

_MAX_SOURCES = 4
_UNREADABLE = (ArithmeticError, LookupError, RecursionError, ValueError)
"""Errors of parsing a text that a later compiler writes in another form."""
_MAX_ERROR = 200

BY_KIND = ("counts", "sent", "link_seconds", "waiting_seconds")
BY_SOURCE = ("top_operations", "unknown_loops")
"""Fields of `Costs` that are mappings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a compiled program on each device.

    All numbers are those of the whole program, in which a loop's body counts as
    often as it runs. Without specifications of the chip, all are 0 except for
    bytes of memory and collectives.

    Attributes:
      argument_bytes: Bytes of the state and the batch.
      output_bytes: Bytes of the results that do not overwrite the state in
        place.
      temporary_bytes: Bytes of intermediate values.
      counts: Number of collectives of each kind, such as "all-reduce".
      sent: Bytes of the arrays that the collectives of each kind send.
      compile_seconds: Compile time in seconds.
      code_bytes: Bytes of the program itself in the device's memory.
      flops: Number of multiplications and additions in matrix products,
        convolutions and attention's kernels.
      kernel_flops: The operations in attention kernels.
      compute_seconds: The time of all these operations, and of the integer
        operations of random bits, at the chip's peak rates for their dtypes.
      moved_bytes: Bytes that are read from and written to the main memory.
      busy_seconds: The time of all instructions, without waiting for links.
      latency_seconds: The time of the instructions with so little work that
        they take the shortest possible time.
      link_seconds: For each kind of collective, the time in which they use the
        links.
      waiting_seconds: The part of it in which no other instruction runs.
      top_operations: The time of the operations that take longest, by a
        description.
      unknown_loops: For each loop whose number of iterations is unknown, the
        time of the one iteration that is counted.
      unread: If the program's text has an unknown form: the error that parsing
        it raised. The numbers are then as if the chip were unknown. "" if the
        text was parsed.
    """

    argument_bytes: float
    output_bytes: float
    temporary_bytes: float
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compile_seconds: float
    code_bytes: float = 0.0
    flops: float = 0.0
    kernel_flops: float = 0.0
    compute_seconds: float = 0.0
    moved_bytes: float = 0.0
    busy_seconds: float = 0.0
    latency_seconds: float = 0.0
    link_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    waiting_seconds: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )
    top_operations: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )
    unknown_loops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unread: str = ""

    @property
    def bytes_in_all(self) -> float:
        """The bytes of memory that the program needs on each device."""
        standing = self.argument_bytes + self.output_bytes
        return standing + self.temporary_bytes + self.code_bytes

    @classmethod
    def measure(
        cls,
        executable: Any,
        seconds: float,
        chip: chips.Chip | None = None,
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
        code = executable.memory_analysis().generated_code_size_in_bytes
        facts: dict[str, Any] = {"code_bytes": code, "compile_seconds": seconds}
        facts |= compiled.measure_memory(executable)
        text = executable.as_text()
        try:
            if chip is None:
                facts |= compiled.measure_collectives(text)
            else:
                facts |= estimate_work(text, chip, devices)
        except _UNREADABLE as error:
            facts["unread"] = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        return cls(**facts)


def estimate_work(
    text: str, chip: chips.Chip, devices: Sequence[Any]
) -> dict[str, Any]:
    """Returns the fields of `Costs` that are computed from a program's text."""
    program = hlo.parse(text)
    totals = Walk(program, chip, devices).visit(program.entry, False)
    facts: dict[str, Any] = {name: {} for name in (*BY_KIND, *BY_SOURCE)}
    # The sources that take longest come first.
    for (name, key), n in sorted(totals.items(), key=lambda x: -x[1]):
        if name not in facts or not key:
            facts[name] = n
        elif n and (name in BY_KIND or len(facts[name]) < _MAX_SOURCES):
            facts[name][key] = n
    return facts
