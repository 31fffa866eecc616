"""The planner: candidates one after the other, compiled side by side."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from keras_strategies._core.compiled import Figures
from keras_strategies.planning.compile.chips import chip_of, memory_of
from keras_strategies.planning.compile.compiler import (
    Compiler,
    DoesNotFit,
    Outcome,
)
from keras_strategies.planning.compile.estimates import estimate
from keras_strategies.planning.compile.lines import (
    Line,
    Measuring,
    bytes_needed,
    find_max_rows,
    grown,
    memory_breakdown,
)
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.report.advice import advice_on
from keras_strategies.planning.report.planned_step import PlannedStep

_NEAR = (0.65, 1.25)
"""Between which shares of the limit bytes are verified at full effort, which
was seen to need up to a tenth less and up to half more."""
_QUICK_SECONDS = 30.0
"""To compile a model at low effort, which is up to twelve times as fast."""
_MOST_TRIES = 24
_MORE = 3
"""How many times as many rows the second program has more: bytes of fewer
are hidden by what the first one needs at other times."""
_HUGE = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A slice and a layout, and what makes the step for it.

    Attributes:
      topology: The slice's name, or the devices' kind.
      layout: How the model lies on it, in words.
      devices: The devices, in the order of the mesh.
      num_replicas: Replicas that they are.
      make: Makes the step.
    """

    topology: str
    layout: str
    devices: Sequence[Any]
    num_replicas: int
    make: Callable[[], Step]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How thoroughly candidates are compiled.

    Attributes:
      is_full: Always at full effort too; None: where bytes are near the limit.
      is_alone: Whether there is one candidate: a model that is compiled as it
        is, within seconds, is compiled at full effort, too.
      is_verified: Whether the most rows that fit are compiled, and one more.
      is_whole: Whether deep models are compiled as they are.
    """

    is_full: bool | None = None
    is_alone: bool = False
    is_verified: bool = False
    is_whole: bool = False


EFFORTS = {"auto": None, "low": False, "full": True}
"""`Effort.is_full` by its public name."""


def iter_plans(
    candidates: Sequence[Candidate],
    compiler: Compiler,
    effort: Effort,
    on_stage: Callable[[Candidate, str], None] = lambda candidate, stage: None,
    on_row: Callable[[PlannedStep], None] = lambda row: None,
) -> Iterator[PlannedStep]:
    """Plans candidates, in their order.

    Args:
      candidates: The candidates.
      compiler: Compiles.
      effort: How thoroughly.
      on_stage: Is told what is done for which candidate.
      on_row: Is given a candidate's step at low effort, before more is
        compiled for it.

    Yields:
      Each one's step. The next one is begun before that, so that its programs
      are compiled beside.
    """
    begun: list[_Planning] = []
    for candidate in candidates:
        on_stage(candidate, "tracing")
        begun.append(_Planning(candidate, compiler, effort, on_stage, on_row))
        if len(begun) > 1:
            yield begun.pop(0).finish()
    for planning in begun:
        yield planning.finish()


@dataclasses.dataclass(eq=False)
class _Planning:
    """One candidate while it is compiled."""

    candidate: Candidate
    compiler: Compiler
    effort: Effort
    on_stage: Callable[[Candidate, str], None]
    on_row: Callable[[PlannedStep], None]

    def __post_init__(self) -> None:
        devices = self.candidate.devices
        self._limit = memory_of(devices[0], len(devices))
        self._chip = chip_of(devices[0])
        self._error: str | None = None
        self._notes: list[str] = []
        try:
            self._step = self.candidate.make()
            replicas = self.candidate.num_replicas
            rows = self._step.rows
            each = max(-(-rows // replicas), 1) * replicas
            self._low = self._begun(rows, rows + _MORE * each)
        except (ValueError, TypeError, RuntimeError) as error:
            self._error = str(error)

    def _begun(self, rows: int, more: int) -> Measuring:
        self._rows = (rows, more)
        try:
            return self._measuring(self._rows)
        except Exception as error:
            # With more rows it may be another one, or none.
            self._rows = (rows, rows)
            begun = self._measuring(self._rows)
            text = _first_line(error)
            self._notes.append(f"The most rows are not known: {text}")
            return begun

    def _measuring(
        self, rows: Sequence[int], *, step: Step | None = None, **kwargs: Any
    ) -> Measuring:
        return Measuring(
            step or self._step,
            self.candidate.devices,
            self.compiler,
            rows,
            is_whole=self.effort.is_whole,
            limit=self._limit,
            **kwargs,
        )

    def finish(self) -> PlannedStep:
        """Waits for the programs, and looks at them."""
        if self._error is not None:
            return self._row(error=self._error)
        try:
            return self._finished()
        except jax.errors.JaxRuntimeError as error:
            # The compiler's: the other candidates are planned all the same.
            return self._row(error=str(error).partition("\n")[0])

    def _finished(self) -> PlannedStep:
        self.on_stage(self.candidate, "compiling")
        first, second = self._low.outcomes()
        low = Line(
            rows=self._rows,
            figures=(first, second),
            is_full=False,
            blocks=self._low.blocks,
        )
        line = low
        row = self._row_of(low, low)
        self.on_row(row)
        if self._is_in_doubt(low):
            self.on_stage(self.candidate, "compiling at full effort")
            full = self._measuring(self._rows[:1], is_full=True)
            (outcome,) = full.outcomes()
            line = Line(
                rows=self._rows,
                figures=(outcome, grown(outcome, first, second)),
                is_full=True,
                blocks=full.blocks,
            )
            row = self._row_of(low, line)
        if self.effort.is_verified and self._is_tpu and self._limit:
            row = self._with_verified_rows(row, line)
        return self._advised(row, first)

    def _is_in_doubt(self, line: Line) -> bool:
        if not self._is_tpu or self.effort.is_full is False:
            return False
        if self.effort.is_full:
            return True
        figures = line.figures[0]
        if self.effort.is_alone and self._is_quick(line):
            return True
        if self._limit is None:
            return False
        if isinstance(figures, DoesNotFit):
            needed = figures.needed
            return needed is not None and needed < self._limit * _NEAR[1]
        # Whether the model's own program fits is for the compiler to say.
        least, most = _NEAR if line.blocks else (_NEAR[0], math.inf)
        return least < figures.bytes_in_all / self._limit < most

    def _is_quick(self, line: Line) -> bool:
        """Whether the model itself is soon compiled at full effort, too."""
        took = [
            f.compile_seconds for f in line.figures if isinstance(f, Figures)
        ]
        return line.blocks is None and max(took, default=0.0) < _QUICK_SECONDS

    @property
    def _is_tpu(self) -> bool:
        return self.candidate.devices[0].platform == "tpu"

    def _row_of(self, low: Line, line: Line) -> PlannedStep:
        """What is known of the step.

        Args:
          low: Its figures at low effort, which have estimates of time.
          line: Those of its bytes.
        """
        figures, fast = line.figures[0], low.figures[0]
        took = sum(
            f.compile_seconds
            for x in {id(low): low, id(line): line}.values()
            for f in x.figures
            if isinstance(f, Figures)
        )
        most = self._most_rows(line)
        facts: dict[str, Any] = {
            "is_full_effort": line.is_full or not self._is_tpu,
            "blocks": line.blocks,
            "tokens": self._step.tokens,
            "compile_seconds": took,
            "memory": memory_breakdown(self._step.state_bytes(), line),
            "most_rows": most,
            "bytes_in_all": bytes_needed(figures),
        }
        if isinstance(figures, DoesNotFit):
            error = str(figures) if figures.needed is None else None
            return self._row(error=error, **facts)
        if self._is_tpu and line.is_full and line.blocks is None:
            facts["is_accepted"] = True
            own = self._rows[0] // self.candidate.num_replicas
            if most is not None:
                facts["most_rows"] = max(most, own)
        facts["counts"] = {k: round(n) for k, n in figures.counts.items()}
        facts["sent"] = dict(figures.sent)
        if self._chip is not None and isinstance(fast, Figures):
            facts["estimate"] = estimate(
                fast,
                self._chip,
                self._flops(low),
                steps=self._step.steps,
                step_bytes=self._step_bytes(),
            )
        return self._row(**facts)

    def _step_bytes(self) -> float:
        """Bytes of the state and a step's batch, where others' are there."""
        if self._step.steps == 1:
            return math.inf
        state = self._step.state_bytes()
        held = state["weights"] + state["slots"] + state["other"]
        return held + self._step.batch_bytes(self._rows[0])

    def _advised(self, row: PlannedStep, low: Outcome) -> PlannedStep:
        """The row with advice.

        Where activations are most of it, the same is compiled with them
        computed again, too: bytes at low effort, as of the other.
        """
        again = self._step.with_remat()
        before, after = bytes_needed(low), None
        is_much = row.memory.get("activations", 0) > (row.bytes_in_all or 0) / 2
        if again is not None and (row.fits is False or is_much):
            self.on_stage(self.candidate, "with keras.RematScope")
            (outcome,) = self._measuring(self._rows[:1], step=again).outcomes()
            after = bytes_needed(outcome)
        has_remat = again is None and self._step.blocks is not None
        advice = advice_on(row, remat=(before, after), has_remat=has_remat)
        words = filter(None, (self._step.note, *self._notes, advice))
        return dataclasses.replace(row, advice=" ".join(words))

    def _flops(self, line: Line) -> float | None:
        rows = self._rows[0]
        if line.blocks is None:
            return self._step.model_flops(rows, None)
        few, many, count = line.blocks
        first = self._step.model_flops(rows, few)
        second = self._step.model_flops(rows, many)
        if first is None or second is None:
            return None
        share = (count - few) / (many - few)
        return first + share * (second - first)

    def _most_rows(self, line: Line) -> int | None:
        """The most rows of a replica that fit by a line; None: unknown."""
        most = None if self._limit is None else line.most_rows(self._limit)
        if most is None:
            return None
        rows = max(math.floor(most / self.candidate.num_replicas), 0)
        return rows if rows <= _HUGE else None

    def _with_verified_rows(self, row: PlannedStep, line: Line) -> PlannedStep:
        """The step with the most rows that fit found by compiling."""
        first, second = map(bytes_needed, line.figures)
        if row.most_rows is None and first is not None and second is not None:
            # More than anybody has, or its bytes are not its rows'.
            return row
        guess = 1 if row.most_rows is None else row.most_rows
        try:
            found, is_verified = find_max_rows(
                guess, self._limit or 0, self._try_rows, _MOST_TRIES
            )
        except Exception as error:
            text = _first_line(error)
            self._notes.append(
                f"The most rows were not found by compiling: {text}"
            )
            return row
        return dataclasses.replace(
            row, most_rows=found, is_most_verified=is_verified
        )

    def _try_rows(self, rows: int) -> tuple[bool, float | None]:
        """Compiles for so many rows a replica: whether they fit, and bytes."""
        self.on_stage(self.candidate, f"trying {rows} rows a replica")
        number = rows * self.candidate.num_replicas
        outcome = self.compiler.submit(
            self._step.lower(number, None),
            self.candidate.devices,
            is_full=True,
        ).result()
        return isinstance(outcome, Figures), bytes_needed(outcome)

    def _row(self, **facts: Any) -> PlannedStep:
        candidate = self.candidate
        rows = getattr(self, "_rows", (0,))[0]
        return PlannedStep(
            topology=candidate.topology,
            layout=candidate.layout,
            num_devices=len(candidate.devices),
            num_replicas=candidate.num_replicas,
            rows=rows,
            limit_bytes=self._limit,
            **facts,
        )


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text or type(error).__name__
