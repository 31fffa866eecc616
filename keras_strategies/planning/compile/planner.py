"""Plans training steps: traces them one by one, compiles them in parallel."""

import concurrent.futures
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from keras_strategies.planning.compile.compiler import (
    Compiler,
    DoesNotFit,
    Outcome,
    summarize_error,
)
from keras_strategies.planning.compile.estimates import (
    describe_unknown,
    estimate,
)
from keras_strategies.planning.compile.lines import (
    Line,
    add_growth,
    find_max_rows,
    get_bytes,
    memory_breakdown,
)
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.program.costs import Costs
from keras_strategies.planning.report.advice import (
    advise_on_logits,
    explain_transfers,
    write_advice,
)
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.seam import (
    chips,
    is_absent_gpu,
)

_NEAR = (0.65, 1.25)
"""If the bytes at low effort are between these fractions of the limit, they are
verified at full effort. Programs compiled at full effort were measured to need
between a fifth less and half more."""
_QUICK_SECONDS = 30.0
"""If compiling a model at low effort takes less than this time, compiling it at
full effort is considered quick. Full effort takes up to twelve times longer."""
_MAX_TRIES = 24
_MORE = {"gpu": 15}
"""The number of additional rows of the second program, as a multiple of the
rows of the first program; by default 3. With fewer, their bytes might not be
visible, because the peak memory of the two programs may be at different points
of the step. Programs for GPUs may be larger than the memory."""
_HUGE = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A slice and a layout of the model, for which a step is planned.

    Attributes:
      topology: The name of the slice, or JAX's name of the device kind.
      layout: The name of the model's layout on the slice.
      devices: The devices.
      make: A function that creates the step to plan.
      describe: A function that returns the text of an error that `make` or the
        step's tracing raised.
    """

    topology: str
    layout: str
    devices: Sequence[Any]
    make: Callable[[], Step]
    describe: Callable[[Exception], str] = str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """Options for how thoroughly candidates are compiled.

    Attributes:
      is_full: Whether to compile at full effort in addition to low effort. None
        to do so only if the bytes are near the limit.
      is_alone: Whether there is only one candidate. Then the model is also
        compiled at full effort if compiling is quick.
      is_verified: Whether the largest number of rows that fits is found by
        compiling at full effort, for that number and for one more row.
    """

    is_full: bool | None = None
    is_alone: bool = False
    is_verified: bool = False


EFFORTS = {"auto": None, "low": False, "full": True}
"""Values of `Effort.is_full`, by the values of the argument `effort`."""


def iter_plans(
    candidates: Sequence[Candidate],
    compiler: Compiler,
    effort: Effort,
    on_stage: Callable[[Candidate, str], None] = lambda candidate, stage: None,
    on_row: Callable[[PlannedStep], None] = lambda row: None,
) -> Iterator[PlannedStep]:
    """Plans candidates in the given order.

    Args:
      candidates: The candidates.
      compiler: The compiler.
      effort: How thoroughly to compile.
      on_stage: A function that is called with a candidate and a description of
        what is being done for it.
      on_row: A function that is called with a candidate's preliminary result,
        from compiling at low effort, before more is compiled for it.

    Yields:
      The planned step of each candidate. The next candidate is started before
      the current one is finished, so that both are compiled in parallel.
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
    """A candidate whose training step is being compiled."""

    candidate: Candidate
    compiler: Compiler
    effort: Effort
    on_stage: Callable[[Candidate, str], None]
    on_row: Callable[[PlannedStep], None]

    def __post_init__(self) -> None:
        devices = self.candidate.devices
        self._limit = chips.find_memory(devices[0], len(devices))
        self._chip = chips.find_chip(devices[0])
        self._is_tpu = devices[0].platform == "tpu"
        processes = {device.process_index for device in devices}
        self._num_local = len(devices) // len(processes)
        self._is_absent = self._is_tpu or is_absent_gpu(devices[0])
        self._error: str | None = None
        self._replicas = 0
        self._notes: list[str] = []
        try:
            self._step = self.candidate.make()
            replicas = self._replicas = self._step.mesh.num_replicas
            rows = self._step.rows
            each = max(-(-rows // replicas), 1) * replicas
            more = each * _MORE.get(devices[0].platform, 3)
            self._low = self._begin(rows, rows + more)
        except (ValueError, TypeError, RuntimeError) as error:
            self._error = self.candidate.describe(error)

    def _begin(
        self, rows: int, more: int
    ) -> "list[concurrent.futures.Future[Outcome]]":
        self._rows = (rows, more)
        first = self._compile(self._step, rows)
        try:
            return [first, self._compile(self._step, more)]
        except Exception as error:
            # Tracing may fail only for the larger number of rows, for example
            # if a loss requires a certain batch size. In this case, the planned
            # step does not tell how many rows fit.
            self._rows = (rows, rows)
            self._notes.append(
                "It is unknown how many rows fit, because more rows raise an "
                f"error: {summarize_error(error)}"
            )
            return [first, first]

    def _compile(
        self, step: Step, rows: int, *, is_full: bool = False
    ) -> "concurrent.futures.Future[Outcome]":
        devices = self._step.mesh.devices
        with warnings.catch_warnings():
            if rows != self._step.rows:
                # The step that is planned has other rows.
                warnings.simplefilter("ignore")
            lowered = step.lower(rows)
        return self.compiler.submit(lowered, devices, is_full=is_full)

    def finish(self) -> PlannedStep:
        """Waits for the compilations and returns the planned step."""
        if self._error is not None:
            return self._make_row(error=self._error)
        try:
            return self._finish()
        except jax.errors.JaxRuntimeError as error:
            # An error of the compiler must not prevent other candidates from
            # being planned.
            return self._make_row(error=str(error).partition("\n")[0])

    def _finish(self) -> PlannedStep:
        self.on_stage(self.candidate, "compiling")
        first, second = (future.result() for future in self._low)
        low = Line(
            rows=self._rows,
            figures=(first, second),
            # Only the TPU compiler has several efforts.
            is_full=not self._is_tpu,
        )
        line = low
        row = self._describe_step(low, low)
        self.on_row(row)
        if self._is_in_doubt(low):
            self.on_stage(self.candidate, "compiling at full effort")
            full = self._compile(self._step, self._rows[0], is_full=True)
            outcome = full.result()
            line = Line(
                rows=self._rows,
                figures=(outcome, add_growth(outcome, first, second)),
                is_full=True,
            )
            row = self._describe_step(low, line)
        if self.effort.is_verified and self._is_absent and self._limit:
            row = self._verify_max_rows(row, line)
        return self._add_advice(row, first)

    def _is_in_doubt(self, line: Line) -> bool:
        if not self._is_tpu or self.effort.is_full is False:
            return False
        is_quick = self.effort.is_alone and self._is_quick(line)
        if self.effort.is_full or is_quick:
            return True
        figures = line.figures[0]
        if self._limit is None:
            return False
        if isinstance(figures, DoesNotFit):
            needed = figures.needed
            return needed is not None and needed < self._limit * _NEAR[1]
        return figures.bytes_in_all > _NEAR[0] * self._limit

    def _is_quick(self, line: Line) -> bool:
        """Returns whether the model should compile quickly at full effort."""
        took = [f.compile_seconds for f in line.figures if isinstance(f, Costs)]
        return max(took, default=0.0) < _QUICK_SECONDS

    def _describe_step(self, low: Line, line: Line) -> PlannedStep:
        """Returns a planned step with the results of the compilations.

        Args:
          low: The costs at low effort, from which times are estimated.
          line: The costs from which the bytes are taken.
        """
        figures, fast = line.figures[0], low.figures[0]
        took = sum(
            f.compile_seconds
            for x in {id(low): low, id(line): line}.values()
            for f in x.figures
            if isinstance(f, Costs)
        )
        maximum = self._find_max_rows(line)
        facts: dict[str, Any] = {
            "is_full_effort": line.is_full,
            "tokens": self._step.tokens,
            "compile_seconds": took,
            "memory": memory_breakdown(self._step.state_bytes(), line),
            "max_rows": maximum,
            "bytes_in_all": get_bytes(figures),
            "host_bytes": self._step.host_bytes() * self._num_local,
        }
        if isinstance(figures, DoesNotFit):
            error = str(figures) if figures.needed is None else None
            return self._make_row(error=error, **facts)
        if self._is_tpu and line.is_full:
            facts["is_accepted"] = True
            accepted = self._rows[0] // self._replicas
            if maximum is not None:
                facts["max_rows"] = max(maximum, accepted)
        steps = self._step.steps
        facts["counts"] = {
            k: round(n / steps) for k, n in figures.counts.items()
        }
        facts["sent"] = {k: n / steps for k, n in figures.sent.items()}
        if self._chip is not None and isinstance(fast, Costs):
            facts["estimate"] = estimate(
                fast,
                self._chip,
                self._step.model_flops(self._rows[0]),
                steps=steps,
                scheduled=figures if line.is_full else None,
                host_bytes=self._step.host_bytes(),
            )
            facts["top_operations"] = {
                k: n / steps for k, n in fast.top_operations.items()
            }
        return self._make_row(**facts)

    def _add_advice(self, row: PlannedStep, low: Outcome) -> PlannedStep:
        """Returns the planned step with advice added.

        If the step does not fit, or most of its memory is activations, it is
        also compiled with rematerialization, to compare the bytes.
        """
        again = self._step.with_remat()
        before, after = get_bytes(low), None
        has_remat = self._step.has_remat
        is_much = row.memory.get("activations", 0) > (row.bytes_in_all or 0) / 2
        if again is not None and (row.fits is False or is_much):
            self.on_stage(self.candidate, "with keras.RematScope")
            # Keras cannot rematerialize some layers, such as `Dropout`.
            with contextlib.suppress(Exception):
                after = get_bytes(self._compile(again, self._rows[0]).result())
            has_remat |= after is None
        advice = write_advice(
            row,
            remat=(before, after),
            has_remat=has_remat,
            narrow_sums=self._step.narrow_sums,
        )
        unknown = describe_unknown(low) if isinstance(low, Costs) else ""
        logits = advise_on_logits(row, self._step.logit_bytes)
        if self._chip is not None:
            rate = self._chip.host_bandwidth
            self._notes.append(explain_transfers(row, rate))
        notes = self._step.note, unknown, *self._notes, logits, advice
        return dataclasses.replace(row, advice=" ".join(filter(None, notes)))

    def _find_max_rows(self, line: Line) -> int | None:
        """Returns how many rows per replica fit, by linear extrapolation.

        Returns None if this number is unknown or exceeds `_HUGE`.
        """
        maximum = line.find_rows_at(self._limit)
        if maximum is None:
            return None
        rows = max(math.floor(maximum / self._replicas), 0)
        return rows if rows <= _HUGE else None

    def _verify_max_rows(self, row: PlannedStep, line: Line) -> PlannedStep:
        """Returns the planned step with `max_rows` found by compiling."""
        first, second = map(get_bytes, line.figures)
        if row.max_rows is None and first is not None and second is not None:
            # More than `_HUGE` rows fit, or the rows make no difference.
            return row
        guess = 1 if row.max_rows is None else row.max_rows
        try:
            maximum, is_verified = find_max_rows(
                guess, self._limit or 0, self._try_rows, _MAX_TRIES
            )
        except Exception as error:
            self._notes.append(
                "The number of rows that fit was not verified, because "
                f"compiling raised an error: {summarize_error(error)}"
            )
            return row
        return dataclasses.replace(
            row, max_rows=maximum, is_max_verified=is_verified
        )

    def _try_rows(self, rows: int) -> tuple[bool, float | None]:
        """Compiles the step at full effort for a number of rows per replica.

        Returns whether the step fits, and the bytes that it needs if known.
        """
        self.on_stage(self.candidate, f"trying {rows} rows per replica")
        number = rows * self._replicas
        outcome = self._compile(self._step, number, is_full=True).result()
        needed = get_bytes(outcome)
        if not self._is_tpu and needed is not None:
            # XLA compiles programs for GPUs of any size.
            return needed <= (self._limit or 0), needed
        return isinstance(outcome, Costs), needed

    def _make_row(self, **facts: Any) -> PlannedStep:
        candidate = self.candidate
        return PlannedStep(
            topology=candidate.topology,
            layout=candidate.layout,
            num_devices=len(candidate.devices),
            num_replicas=self._replicas,
            rows=getattr(self, "_rows", (0,))[0],
            limit_bytes=self._limit,
            **facts,
        )
