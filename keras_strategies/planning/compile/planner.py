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
from keras_strategies.planning.compile.lines import Line, memory_breakdown
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.program.costs import Costs
from keras_strategies.planning.report.advice import (
    advise_on_logits,
    write_advice,
)
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.seam import chips

_NEAR = (0.65, 1.25)
"""If the bytes at low effort are between these fractions of the limit, they are
verified at full effort. Programs compiled at full effort were measured to need
between a fifth less and half more."""
_MORE = {"gpu": 15}
"""The number of additional rows of the second program, as a multiple of the
rows of the first program; by default 3. With fewer, their bytes might not be
visible, because the peak memory of the two programs may be at different points
of the step. Programs for GPUs may be larger than the memory."""
_HUGE = 2**20
EFFORTS = ("auto", "low", "full")
"""How thoroughly to compile. "full" also compiles at full effort; "auto" does
so only if the bytes are near the limit."""


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


def iter_plans(
    candidates: Sequence[Candidate], compiler: Compiler, effort: str
) -> Iterator[PlannedStep]:
    """Plans candidates in the given order.

    Args:
      candidates: The candidates.
      compiler: The compiler.
      effort: One of `EFFORTS`.

    Yields:
      The planned step of each candidate. The next candidate is started before
      the current one is finished, so that both are compiled in parallel.
    """
    begun: list[_Planning] = []
    for candidate in candidates:
        begun.append(_Planning(candidate, compiler, effort))
        if len(begun) > 1:
            yield begun.pop(0).finish()
    for planning in begun:
        yield planning.finish()


@dataclasses.dataclass(eq=False)
class _Planning:
    """A candidate whose training step is being compiled."""

    candidate: Candidate
    compiler: Compiler
    effort: str

    def __post_init__(self) -> None:
        devices = self.candidate.devices
        self._limit = chips.find_memory(devices[0], len(devices))
        self._chip = chips.find_chip(devices[0])
        self._is_tpu = devices[0].platform == "tpu"
        processes = {device.process_index for device in devices}
        self._num_local = len(devices) // len(processes)
        self._error: str | None = None
        self._rows = self._replicas = 0
        self._notes: list[str] = []
        try:
            self._step = self.candidate.make()
            self._rows = self._step.rows
            replicas = self._replicas = self._step.mesh.num_replicas
            each = max(-(-self._rows // replicas), 1) * replicas
            self._more = each * _MORE.get(devices[0].platform, 3)
            self._first = self._compile(self._step, self._rows)
            self._second = self._begin_larger()
        except (ValueError, TypeError, RuntimeError) as error:
            self._error = self.candidate.describe(error)

    def _begin_larger(self) -> "concurrent.futures.Future[Outcome] | None":
        try:
            return self._compile(self._step, self._rows + self._more)
        except Exception as error:
            # Tracing may fail only for the larger number of rows, for example
            # if a loss requires a certain batch size. In this case, the planned
            # step does not tell how many rows fit.
            self._notes.append(
                "It is unknown how many rows fit, because more rows raise an "
                f"error: {summarize_error(error)}"
            )
            return None

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
        low = self._first.result()
        high = None if self._second is None else self._second.result()
        needed, larger = low.bytes_in_all, high and high.bytes_in_all
        slope = temporary = None
        if needed is not None and larger is not None:
            slope = temporary = (larger - needed) / self._more
        if isinstance(low, Costs) and isinstance(high, Costs):
            growth = high.temporary_bytes - low.temporary_bytes
            temporary = growth / self._more
        line = Line(
            rows=self._rows,
            outcome=low,
            bytes_per_row=slope,
            temporary_per_row=temporary,
            # Only the TPU compiler has several efforts.
            is_full=not self._is_tpu,
        )
        if self._needs_full_effort(low):
            full = self._compile(self._step, self._rows, is_full=True)
            line = dataclasses.replace(
                line, outcome=full.result(), is_full=True
            )
        return self._add_advice(self._describe_step(low, line), low)

    def _needs_full_effort(self, low: Outcome) -> bool:
        if not self._is_tpu or self.effort == "low":
            return False
        if self.effort == "full":
            return True
        needed = low.bytes_in_all
        if self._limit is None or needed is None:
            return False
        share = needed / self._limit
        # Arrays of a program that fits may share memory.
        return _NEAR[0] < share and (isinstance(low, Costs) or share < _NEAR[1])

    def _describe_step(self, low: Outcome, line: Line) -> PlannedStep:
        """Returns a planned step with the results of the compilations.

        Args:
          low: The costs at low effort, from which times are estimated.
          line: The costs from which the bytes are taken.
        """
        costs, maximum = line.outcome, self._find_max_rows(line)
        facts: dict[str, Any] = {
            "is_full_effort": line.is_full,
            "tokens": self._step.tokens,
            "memory": memory_breakdown(self._step.state_bytes(), line),
            "max_rows": maximum,
            "bytes_in_all": costs.bytes_in_all,
            "host_bytes": self._step.host_bytes() * self._num_local,
        }
        if isinstance(costs, DoesNotFit):
            error = str(costs) if costs.bytes_in_all is None else None
            return self._make_row(error=error, **facts)
        if self._is_tpu and line.is_full:
            facts["is_accepted"] = True
            accepted = self._rows // self._replicas
            if maximum is not None:
                facts["max_rows"] = max(maximum, accepted)
        steps = self._step.steps
        facts["counts"] = {k: round(n / steps) for k, n in costs.counts.items()}
        facts["sent"] = {k: n / steps for k, n in costs.sent.items()}
        if self._chip is not None and isinstance(low, Costs):
            facts["estimate"] = estimate(
                low,
                self._chip,
                self._step.model_flops(self._rows),
                steps=steps,
                scheduled=costs if line.is_full else None,
                host_bytes=self._step.host_bytes(),
            )
            facts["top_operations"] = {
                k: n / steps for k, n in low.top_operations.items()
            }
        return self._make_row(**facts)

    def _add_advice(self, row: PlannedStep, low: Outcome) -> PlannedStep:
        """Returns the planned step with advice added.

        If the step does not fit, or most of its memory is activations, it is
        also compiled with rematerialization, to compare the bytes.
        """
        again = self._step.with_remat()
        after, has_remat = None, self._step.has_remat
        is_much = row.memory.get("activations", 0) > (row.bytes_in_all or 0) / 2
        if again is not None and (row.fits is False or is_much):
            # Keras cannot rematerialize some layers, such as `Dropout`.
            with contextlib.suppress(Exception):
                after = self._compile(again, self._rows).result().bytes_in_all
            has_remat |= after is None
        remat = low.bytes_in_all, after
        advice = write_advice(row, remat=remat, has_remat=has_remat)
        unknown = describe_unknown(low) if isinstance(low, Costs) else ""
        logits = advise_on_logits(row, self._step.logit_bytes)
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

    def _make_row(self, **facts: Any) -> PlannedStep:
        candidate = self.candidate
        return PlannedStep(
            topology=candidate.topology,
            layout=candidate.layout,
            num_devices=len(candidate.devices),
            num_replicas=self._replicas,
            rows=self._rows,
            limit_bytes=self._limit,
            **facts,
        )
