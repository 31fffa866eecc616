"""Computes a step's bytes for any number of rows from two compilations.

The bytes of a compiled program are linear in the number of rows. So the bytes
for two numbers of rows determine a line, from which those for other numbers
are computed.
"""

import dataclasses
from collections.abc import Mapping

from keras_strategies.planning.compile.compiler import Outcome
from keras_strategies.planning.program.costs import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The bytes of a training step as a function of its number of rows.

    Attributes:
      rows: The number of rows of the global batch.
      outcome: The result of compiling the step for these rows.
      bytes_per_row: The bytes on a device that each further row needs. None if
        unknown.
      temporary_per_row: The temporary bytes among them, without the batch; all
        of them if one of the programs does not fit; None if unknown.
      is_full: Whether the program was compiled at full effort.
    """

    rows: int
    outcome: Outcome
    bytes_per_row: float | None
    temporary_per_row: float | None = None
    is_full: bool

    def find_rows_at(self, limit: float | None) -> float | None:
        """Returns the number of rows at which the memory reaches a limit.

        The limit is in bytes on a device. Returns None if it is None, if the
        bytes do not grow with the rows, or if the compiler did not report them.
        """
        needed, slope = self.outcome.bytes_in_all, self.bytes_per_row
        if limit is None or needed is None or slope is None or slope <= 0:
            return None
        rows = self.rows + (limit - needed) / slope
        if limit >= needed:
            return rows
        # A line that is negative at 0 rows is not used for fewer rows.
        return min(rows, self.rows * limit / needed)


def memory_breakdown(
    state: Mapping[str, float], line: Line
) -> Mapping[str, float]:
    """Returns the bytes on a device by category, as in `PlannedStep.memory`.

    Args:
      state: The bytes of weights, slots, other state and gradients, computed
        from their shapes.
      line: The bytes of the step.
    """
    outcome = line.outcome
    if isinstance(outcome, Costs):
        standing = outcome.argument_bytes + outcome.output_bytes
        temporary, code = outcome.temporary_bytes, outcome.code_bytes
    elif outcome.bytes_in_all is not None:
        # For a program that does not fit, XLA reports only the total bytes.
        held = state["weights"] + state["slots"] + state["other"]
        standing = min(held, outcome.bytes_in_all)
        temporary, code = outcome.bytes_in_all - standing, 0.0
    else:
        return {}
    growing = max(line.temporary_per_row or 0.0, 0.0) * line.rows
    activations = min(growing, temporary)
    gradients = min(state["gradients"], temporary - activations)
    known = state["weights"] + state["slots"]
    return {
        "weights": state["weights"],
        "slots": state["slots"],
        "other": max(standing - known, 0.0),
        "gradients": gradients,
        "activations": activations,
        "temporary": temporary - activations - gradients,
        "code": code,
    }
