"""Figures of a step for any number of rows, from a few compilations.

Bytes and operations of a step are a line in its rows, and in the number of
its model's equal blocks. Two compilations give a line.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_strategies._core.compiled import Figures
from keras_strategies._types import Tree
from keras_strategies.planning.compile.compiler import (
    Compiler,
    DoesNotFit,
    Outcome,
)
from keras_strategies.planning.compile.step import Step

FEW_BLOCKS = {False: 4, True: 2}
"""Blocks of the shorter of two models that stand for a deep one, at low and at
full effort. The other one has twice as many."""
MANY_BLOCKS = {False: 16, True: 8}
"""The fewest blocks of a model that two short ones stand for."""
BLOCK_OVERHEAD = 2.5e6
"""Bytes that a block may add besides what it keeps and its gradients: room
that XLA leaves around small arrays. Measured for TPUs: 1.1 MB a block of
width 128 on 8 chips, 2.3 on 16, less of wide ones."""


_MOST_ROWS = 2**24
_NARROW = 8
_PARTS = 16
_BEYOND = 1.02

Try = Callable[[int], tuple[bool, float | None]]
"""Whether so many rows fit, and the bytes that they need, if known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Figures of a step for two numbers of rows.

    Attributes:
      rows: The numbers.
      figures: What was compiled for each, or that it does not fit.
      is_full: Whether compiled at full effort.
      blocks: Of how many blocks the compiled models were, and the model; None:
        the model itself was compiled.
    """

    rows: tuple[int, int]
    figures: tuple[Outcome, Outcome]
    is_full: bool
    blocks: tuple[int, int, int] | None

    def most_rows(self, limit: float) -> float | None:
        """How many rows fit by the line; None: it does not rise, or the
        compiler did not say what is needed."""
        first, second = map(bytes_needed, self.figures)
        if first is None or second is None or second <= first:
            return None
        low, high = self.rows
        return low + (limit - first) * (high - low) / (second - first)


def bytes_needed(outcome: Outcome) -> float | None:
    """Bytes of a device in all; None: the compiler did not say."""
    if isinstance(outcome, DoesNotFit):
        return outcome.needed
    return outcome.bytes_in_all


def grown(outcome: Outcome, before: Outcome, after: Outcome) -> Outcome:
    """An outcome and the bytes by which others grew, as far as is known."""
    if (
        isinstance(outcome, Figures)
        and isinstance(before, Figures)
        and isinstance(after, Figures)
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
    own, first, second = map(bytes_needed, (outcome, before, after))
    if own is None or first is None or second is None:
        return outcome
    return DoesNotFit("It needs more than others.", own + second - first)


class Measuring:
    """Compilations of a step that run, and become its figures.

    Args:
      step: The step.
      devices: Those it is for, in the order of its mesh.
      compiler: Compiles.
      rows: Numbers of rows of the global batch.
      is_full: Whether at full effort.
      is_whole: Whether the model is compiled as it is, however deep.
      limit: Bytes that a device has, if they are known.

    Attributes:
      blocks: Of how many blocks the compiled models are, and the model; None:
        the model itself is compiled.
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
        if count >= MANY_BLOCKS[is_full] and not is_whole:
            few = FEW_BLOCKS[is_full]
            self.blocks = (few, 2 * few, count)

        def begin(
            number: int, blocks: int | None
        ) -> concurrent.futures.Future[Outcome]:
            lowered = step.lower(number, blocks)
            return compiler.submit(lowered, devices, is_full=is_full)

        def begin_all() -> list[list[concurrent.futures.Future[Outcome]]]:
            variants = self.blocks[:2] if self.blocks else (None,)
            return [[begin(r, b) for b in variants] for r in rows]

        self._begin = begin

        try:
            self._running = begin_all()
        except Exception:
            if self.blocks is None:
                raise
            # A short model is not to be made: an optimizer has no config, or
            # a loss has the name of a block. The model itself is there.
            self.blocks = None
            self._running = begin_all()

    def outcomes(self) -> list[Outcome]:
        """The figures for each number of rows, once all is compiled."""
        found = [[f.result() for f in row] for row in self._running]
        if self.blocks is None:
            return [outcome for (outcome,) in found]
        pairs = list(zip(self._rows, found, strict=True))
        most = [self._whole(rows, outcomes) for rows, outcomes in pairs]
        needed = bytes_needed(most[0])
        if self._limit is None or needed is None or needed <= self._limit:
            return most
        # XLA keeps more of a short model than it must.
        least = [
            self._whole(rows, outcomes, is_least=True)
            for rows, outcomes in pairs
        ]
        if (bytes_needed(least[0]) or 0.0) > self._limit:
            return least
        # The model itself decides.
        self.blocks = None
        first = self._begin(self._rows[0], None).result()
        return [first, *(grown(first, least[0], x) for x in least[1:])]

    def _whole(
        self, rows: int, outcomes: Sequence[Outcome], *, is_least: bool = False
    ) -> Outcome:
        assert self.blocks is not None
        few, many = outcomes
        least, most = self._step.block_bytes(rows)
        if not self._step.keeps_nothing_else:
            most = math.inf
        elif is_least:
            most = least
        else:
            most += BLOCK_OVERHEAD
        if isinstance(few, Figures) and isinstance(many, Figures):
            return extrapolated(few, many, self.blocks, (least, most))
        needed = None
        first, second = bytes_needed(few), bytes_needed(many)
        if first is not None and second is not None:
            num_few, num_many, count = self.blocks
            slope = max((second - first) / (num_many - num_few), least)
            needed = second + slope * (count - num_many)
        return DoesNotFit("A part of the model does not fit.", needed)


def extrapolated(
    few: Figures,
    many: Figures,
    blocks: tuple[int, int, int],
    block_bytes: tuple[float, float],
) -> Figures:
    """The figures of a deep model, by those of two short ones.

    Args:
      few: Figures of the shortest.
      many: Figures of the other one.
      blocks: Of how many blocks they are, and the deep model.
      block_bytes: Temporaries that each block adds at least, and at most
        (infinite: unknown). In short models those of other layers hide them,
        and the line through two models would carry every difference of a few
        arrays far.
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


def combine(a: Figures, of_a: float, b: Figures, of_b: float) -> Figures:
    """Returns `of_a * a + of_b * b`, where nothing is less than 0.

    Seconds to compile are added up.
    """

    def add(x: Tree, y: Tree) -> Tree:
        if isinstance(x, Mapping):
            kinds = dict.fromkeys((*x, *y))
            return {k: add(x.get(k, 0), y.get(k, 0)) for k in kinds}
        return max(of_a * x + of_b * y, 0)

    names = [field.name for field in dataclasses.fields(a)]
    sums = {n: add(getattr(a, n), getattr(b, n)) for n in names}
    took = a.compile_seconds + b.compile_seconds
    return dataclasses.replace(a, **sums | {"compile_seconds": took})


def memory_breakdown(
    state: Mapping[str, float], line: Line
) -> Mapping[str, float]:
    """Returns a device's bytes by kind, of what a compiler reports.

    The kinds are those of `PlannedStep.memory`.

    Args:
      state: Weights, slots and other state, and all gradients, by arithmetic.
      line: The program's figures for two numbers of rows.
    """
    first, second = line.figures
    if isinstance(first, Figures):
        standing = first.argument_bytes + first.output_bytes
        temporary = first.temporary_bytes
    elif first.needed is not None:
        # Of which the compiler says no more.
        held = state["weights"] + state["slots"] + state["other"]
        standing = min(held, first.needed)
        temporary = first.needed - standing
    else:
        return {}
    sizes = bytes_needed(first), bytes_needed(second)
    if isinstance(first, Figures) and isinstance(second, Figures):
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
    }


def find_max_rows(
    guess: int, limit: float, fits: Try, most_tries: int
) -> tuple[int, bool]:
    """Finds the largest batch that fits by compiling at several sizes.

    Bytes are nearly a line in the rows, so the line between the two ends of
    what is left is followed, and what it leaves is halved in the end.

    Args:
      guess: Where the search begins.
      limit: The bytes that there are.
      fits: Tries a number of rows.
      most_tries: After so many the search ends.

    Returns:
      The most rows that were seen to fit, and whether one more was tried,
      which does not.
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
        tried = _between(low, of_low, high, of_high, limit)
    return low, False


def _between(
    low: int, of_low: float, high: int, of_high: float | None, limit: float
) -> int:
    """Where to look between rows that fit and rows that do not."""
    width = high - low
    if width <= _NARROW or of_high is None or of_high <= max(of_low, limit):
        return (low + high) // 2
    share = (limit - of_low) / (of_high - of_low)
    margin = max(width // _PARTS, 1)
    wanted = low + math.floor(share * width)
    return min(max(wanted, low + margin), high - margin)
