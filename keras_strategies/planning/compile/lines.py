"""Computes a step's costs for any number of rows from a few compilations.

The costs are the bytes, operations and collectives of a compiled program. Bytes
and operations are linear in the number of rows, and in the number of the
model's equal blocks. So the costs of two compilations determine a line, from
which the costs for other numbers of rows or blocks are computed.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_strategies._types import Tree
from keras_strategies.planning.compile.compiler import (
    Compiler,
    DoesNotFit,
    Outcome,
)
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.program.costs import BY_SOURCE, Costs

FEW_BLOCKS = {False: 4, True: 2}
"""Number of blocks of the shorter of the two models that are compiled in place
of a deep model, at low and at full effort. The longer model has twice this
number."""
MANY_BLOCKS = {False: 16, True: 8}
"""The smallest number of blocks for which two shorter models are compiled
instead of the full model."""
GPU_BLOCKS = 8, 32
"""For GPUs: the number of blocks of the shorter model, and the smallest number
of blocks for which two shorter models are compiled."""
BLOCK_OVERHEAD = 2.5e6
"""Bytes that a block may add in addition to its stored arrays and gradients,
because XLA adds padding around small arrays. Measured on TPUs: 1.1 MB per block
of width 128 on 8 chips, 2.3 MB on 16 chips, less for wider blocks."""


_MOST_ROWS = 2**24
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
      blocks: The block counts of the two shorter models that were compiled in
        place of the full model, followed by that of the full model. None if the
        full model was compiled.
    """

    rows: tuple[int, int]
    figures: tuple[Outcome, Outcome]
    is_full: bool
    blocks: tuple[int, int, int] | None

    def find_rows_at(self, limit: float) -> float | None:
        """Returns the number of rows at which the memory reaches a limit.

        The limit is in bytes on a device. Returns None if the bytes do not grow
        with the rows, or if the compiler did not report them.
        """
        first, second = map(get_bytes, self.figures)
        if first is None or second is None or second <= first:
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
    if (
        isinstance(outcome, Costs)
        and isinstance(before, Costs)
        and isinstance(after, Costs)
    ):
        return dataclasses.replace(
            outcome,
            **{
                name: getattr(outcome, name)
                + getattr(after, name)
                - getattr(before, name)
                for name in (
                    "argument_bytes",
                    "output_bytes",
                    "temporary_bytes",
                )
            },
        )
    base, first, second = map(get_bytes, (outcome, before, after))
    if base is None or first is None or second is None:
        return outcome
    return DoesNotFit("The program does not fit.", base + second - first)


class Measuring:
    """Compiles a training step several times, to compute its costs.

    Args:
      step: The step.
      devices: The step's devices, in the order of its mesh.
      compiler: The compiler.
      rows: The sizes of the global batch to compile for.
      is_full: Whether to compile at full effort.
      is_whole: Whether to always compile the full model, with all of its
        blocks.
      limit: The bytes that a program may use on a device. None if unknown.

    Attributes:
      blocks: The block counts of the two shorter models that are compiled in
        place of the full model, followed by that of the full model. None if the
        full model is compiled.
    """

    def __init__(
        self,
        step: Step,
        devices: Sequence[Any],
        compiler: Compiler,
        rows: Sequence[int],
        *,
        is_full: bool = False,
        is_whole: bool = False,
        limit: float | None = None,
    ) -> None:
        self._step, self._rows, self._limit = step, rows, limit
        count = 0 if step.blocks is None else len(step.blocks)
        self.blocks: tuple[int, int, int] | None = None
        self._is_gpu = any(d.platform == "gpu" for d in devices)
        few, many = FEW_BLOCKS[is_full], MANY_BLOCKS[is_full]
        if self._is_gpu:
            few, many = GPU_BLOCKS
        if count >= many and not is_whole:
            self.blocks = (few, 2 * few, count)

        def begin(
            number: int, blocks: int | None
        ) -> concurrent.futures.Future[Outcome]:
            lowered = step.lower(number, blocks)
            return compiler.submit(lowered, devices, is_full=is_full)

        self._begin = begin
        try:
            self._running = self._begin_all()
        except Exception:
            if self.blocks is None:
                raise
            # No shorter model can be created, for example because the optimizer
            # has no config or a loss refers to a block by name. So the full
            # model is compiled.
            self.blocks = None
            self._running = self._begin_all()

    def _begin_all(self) -> list[list[concurrent.futures.Future[Outcome]]]:
        variants = self.blocks[:2] if self.blocks else (None,)
        return [[self._begin(r, b) for b in variants] for r in self._rows]

    def wait(self) -> list[Outcome]:
        """Waits for the compilations; returns a result for each number of rows.

        For a deep model, an upper and a lower estimate of its bytes are
        computed. If the upper estimate fits, it is returned. If even the lower
        estimate does not fit, the lower one is returned. Otherwise the full
        model is compiled.
        """
        results = [[f.result() for f in row] for row in self._running]
        if self.blocks is None:
            return [outcome for (outcome,) in results]
        pairs = list(zip(self._rows, results, strict=True))
        most = [self._extrapolate(rows, outcomes) for rows, outcomes in pairs]
        needed = get_bytes(most[0])
        if self._limit is None or needed is None or needed <= self._limit:
            return most
        # In a short model XLA may keep more values in memory than it must, so
        # the upper estimate may be too high.
        least = [
            self._extrapolate(rows, outcomes, is_least=True)
            for rows, outcomes in pairs
        ]
        if (get_bytes(least[0]) or 0.0) > self._limit:
            return least
        # The estimates do not tell whether the model fits, so the full model is
        # compiled.
        self.blocks = None
        first = self._begin(self._rows[0], None).result()
        return [first, *(add_growth(first, least[0], x) for x in least[1:])]

    def _extrapolate(
        self, rows: int, outcomes: Sequence[Outcome], *, is_least: bool = False
    ) -> Outcome:
        assert self.blocks is not None
        few, many = outcomes
        least, most = self._step.block_bytes(rows)
        if not self._step.keeps_nothing_else:
            most = math.inf
        elif is_least:
            most = least
        elif self._is_gpu:
            # XLA may begin to compute the next block again while it waits for a
            # collective.
            most = math.inf
        else:
            most += BLOCK_OVERHEAD
        if isinstance(few, Costs) and isinstance(many, Costs):
            return extrapolate(few, many, self.blocks, (least, most))
        needed = None
        first, second = get_bytes(few), get_bytes(many)
        if first is not None and second is not None:
            num_few, num_many, count = self.blocks
            slope = max((second - first) / (num_many - num_few), least)
            needed = second + slope * (count - num_many)
        return DoesNotFit(
            "Even a model with fewer blocks does not fit.", needed
        )


def extrapolate(
    few: Costs,
    many: Costs,
    blocks: tuple[int, int, int],
    block_bytes: tuple[float, float],
) -> Costs:
    """Extrapolates the costs of a deep model from those of two shorter models.

    Args:
      few: The costs of the model with the fewest blocks.
      many: The costs of the model with more blocks.
      blocks: The block counts of these two models and of the deep model.
      block_bytes: Lower and upper bounds of the temporary bytes that each block
        adds. The upper bound is infinite if unknown. Bounds are needed for two
        reasons. In short models, the temporaries of other layers may be larger
        than those of blocks and hide their growth. And extrapolation magnifies
        a difference of a few arrays between the two models.
    """
    num_few, num_many, count = blocks
    share = (count - num_few) / (num_many - num_few)
    line = combine(few, 1 - share, many, share)
    least, most = block_bytes
    base, before = many.temporary_bytes, few.temporary_bytes
    slope = max((base - before) / (num_many - num_few), least)
    if most < math.inf:
        base, slope = max(base, before), min(slope, most)
    temporary = base + (count - num_many) * slope
    return dataclasses.replace(line, temporary_bytes=temporary)


def combine(a: Costs, of_a: float, b: Costs, of_b: float) -> Costs:
    """Returns `of_a * a + of_b * b`, field by field, for two programs' costs.

    Negative results are replaced by 0. Compile times are added.
    """

    def add(x: Tree, y: Tree) -> Tree:
        if isinstance(x, Mapping):
            kinds = dict.fromkeys((*x, *y))
            return {k: add(x.get(k, 0), y.get(k, 0)) for k in kinds}
        return max(of_a * x + of_b * y, 0)

    kept = {*BY_SOURCE, "unread"}
    names = {field.name for field in dataclasses.fields(a)} - kept
    sums = {n: add(getattr(a, n), getattr(b, n)) for n in names}
    for name in BY_SOURCE:
        # Layers of blocks have other names in each block. Only the sources that
        # both models have, such as an optimizer, are combined.
        first = getattr(a, name)
        sums[name] = {
            source: add(first.get(source, seconds), seconds)
            for source, seconds in getattr(b, name).items()
        }
    sums["compile_seconds"] = a.compile_seconds + b.compile_seconds
    return dataclasses.replace(b, **sums, unread=a.unread or b.unread)


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
    guess: int, limit: float, fits: Try, most_tries: int
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
      most_tries: The maximum number of tries.

    Returns:
      The largest tried number of rows that fits, and whether it is verified
      that one more row does not fit.
    """
    low, of_low = 0, 0.0
    high: int | None = None
    of_high: float | None = None
    tried = min(max(guess, 1), _MOST_ROWS)
    for _ in range(most_tries):
        is_fitting, needed = fits(tried)
        if is_fitting:
            low, of_low = tried, limit / 2 if needed is None else needed
        else:
            high, of_high = tried, needed
        if high is None:
            if low >= _MOST_ROWS:
                break
            more = low * limit / max(of_low, 1.0) * _BEYOND
            tried = min(max(math.ceil(more), low + 1), _MOST_ROWS)
            continue
        if high - low == 1:
            return low, True
        tried = _choose_between(low, of_low, high, of_high, limit)
    return low, False


def _choose_between(
    low: int, of_low: float, high: int, of_high: float | None, limit: float
) -> int:
    """Returns the number of rows to try next, between `low` and `high`.

    `low` rows fit, and `high` rows do not.
    """
    width = high - low
    if width <= _NARROW or of_high is None or of_high <= max(of_low, limit):
        return (low + high) // 2
    share = (limit - of_low) / (of_high - of_low)
    margin = max(width // _PARTS, 1)
    estimated = low + math.floor(share * width)
    return min(max(estimated, low + margin), high - margin)
