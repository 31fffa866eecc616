"""Computes a step's bytes for any number of rows from two compilations.

The bytes of a compiled program are linear in the number of rows. So the costs
of two compilations determine a line, from which the bytes for other numbers of
rows are computed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from keras_strategies.planning.compile.compiler import DoesNotFit, Outcome
from keras_strategies.planning.program.costs import Costs

_MAX_ROWS = 2**24
_NARROW = 8
_PARTS = 16
_BEYOND = 1.02

Try = Callable[[int], tuple[bool, float | None]]
"""A function of a number of rows. It returns whether a step with so many rows
fits, and the bytes that it needs (None if unknown)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The costs of a training step at two batch sizes, which define a line.

    Attributes:
      rows: The two numbers of rows of the global batch. They are equal if the
        step cannot be traced with more rows.
      figures: The result of compiling the step for each number of rows.
      is_full: Whether the programs were compiled at full effort.
    """

    rows: tuple[int, int]
    figures: tuple[Outcome, Outcome]
    is_full: bool

    def find_rows_at(self, limit: float | None) -> float | None:
        """Returns the number of rows at which the memory reaches a limit.

        The limit is in bytes on a device. Returns None if it is None, if the
        bytes do not grow with the rows, or if the compiler did not report them.
        """
        first, second = map(get_bytes, self.figures)
        if limit is None or first is None or second is None or second <= first:
            return None
        low, high = self.rows
        rows = low + (limit - first) * (high - low) / (second - first)
        # A line that is negative at 0 rows is not used for fewer rows.
        return rows if limit >= first else min(rows, low * limit / first)


def get_bytes(outcome: Outcome) -> float | None:
    """Returns the bytes that a program needs on a device; None if unknown."""
    if isinstance(outcome, DoesNotFit):
        return outcome.needed
    return outcome.bytes_in_all


def add_growth(outcome: Outcome, before: Outcome, after: Outcome) -> Outcome:
    """Adds the growth in bytes from `before` to `after` to a program's bytes.

    Returns:
      `outcome + after - before`, as far as these bytes were reported.
    """
    costs = [x for x in (outcome, after, before) if isinstance(x, Costs)]
    if len(costs) == 3:
        sizes = dict[str, float]()
        for name in ("argument_bytes", "output_bytes", "temporary_bytes"):
            base, more, less = (getattr(x, name) for x in costs)
            sizes[name] = base + more - less
        return dataclasses.replace(costs[0], **sizes)
    base, first, second = map(get_bytes, (outcome, before, after))
    if base is None or first is None or second is None:
        return outcome
    return DoesNotFit("The program does not fit.", base + second - first)


def memory_breakdown(
    state: Mapping[str, float], line: Line
) -> Mapping[str, float]:
    """Returns the bytes on a device by category, as in `PlannedStep.memory`.

    Args:
      state: The bytes of weights, slots, other state and gradients, computed
        from their shapes.
      line: The costs of the step at two batch sizes.
    """
    first, second = line.figures
    if isinstance(first, Costs):
        standing = first.argument_bytes + first.output_bytes
        temporary, code = first.temporary_bytes, first.code_bytes
    elif first.needed is not None:
        # For a program that does not fit, XLA reports only the total bytes.
        held = state["weights"] + state["slots"] + state["other"]
        standing = min(held, first.needed)
        temporary, code = first.needed - standing, 0.0
    else:
        return {}
    sizes = get_bytes(first), get_bytes(second)
    if isinstance(first, Costs) and isinstance(second, Costs):
        sizes = first.temporary_bytes, second.temporary_bytes
    activations = 0.0
    if sizes[0] is not None and sizes[1] is not None:
        low, high = line.rows
        growing = max(sizes[1] - sizes[0], 0.0) * low / max(high - low, 1)
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


def find_max_rows(
    guess: int, limit: float, fits: Try, max_tries: int
) -> tuple[int, bool]:
    """Finds the largest number of rows that fits, by compiling for several.

    The bytes are nearly linear in the number of rows, so the search
    interpolates between the ends of the remaining interval, and bisects the
    interval once it is narrow.

    Args:
      guess: The first number of rows to try.
      limit: The bytes that a program may use on a device.
      fits: A function that compiles the step for a number of rows. It returns
        whether it fits, and the bytes that it needs (None if unknown).
      max_tries: The maximum number of tries.

    Returns:
      The largest tried number of rows that fits, and whether it is verified
      that one more row does not fit.
    """
    low, low_bytes = 0, 0.0
    high: int | None = None
    high_bytes: float | None = None
    tried = min(max(guess, 1), _MAX_ROWS)
    for _ in range(max_tries):
        is_fitting, needed = fits(tried)
        if is_fitting:
            low, low_bytes = tried, limit / 2 if needed is None else needed
        else:
            high, high_bytes = tried, needed
        if high is None:
            if low >= _MAX_ROWS:
                break
            more = low * limit / max(low_bytes, 1.0) * _BEYOND
            tried = min(max(math.ceil(more), low + 1), _MAX_ROWS)
            continue
        if high - low == 1:
            return low, True
        tried = _choose_between(low, low_bytes, high, high_bytes, limit)
    return low, False


def _choose_between(
    low: int,
    low_bytes: float,
    high: int,
    high_bytes: float | None,
    limit: float,
) -> int:
    """Returns the number of rows to try next, between `low` and `high`.

    `low` rows fit, and `high` rows do not.
    """
    width = high - low
    if (
        width <= _NARROW
        or high_bytes is None
        or high_bytes <= max(low_bytes, limit)
    ):
        return (low + high) // 2
    share = (limit - low_bytes) / (high_bytes - low_bytes)
    margin = max(width // _PARTS, 1)
    estimated = low + math.floor(share * width)
    return min(max(estimated, low + margin), high - margin)
