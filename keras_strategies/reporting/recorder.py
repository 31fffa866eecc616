"""Records the time that a training loop spends in each phase of its steps."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies._core.batches import Execution, Segment
from keras_strategies._core.names.phases import (
    CALLBACKS,
    DEVICE,
    EVALUATE,
    INPUT,
    PROGRAM,
    READ,
    SAVE,
    STEP,
)
from keras_strategies.reporting.compilations import Compilations
from keras_strategies.reporting.histogram import Histogram
from keras_strategies.reporting.shapes import (
    ShapeCount,
    Signature,
    describe,
    describe_change,
    sign,
)

_MOST_SHAPES = 1000
_PHASES = (INPUT, STEP, PROGRAM, DEVICE, CALLBACKS, SAVE, EVALUATE)
_OUTER = (SAVE, EVALUATE)
"""Phases in which no others are counted."""

FIRST = "the first step"
SHAPE = "a new shape: "
AGAIN = "a step, for the same shapes"


class _Open:
    """A phase that has begun."""

    def __init__(self, name: str, since: float) -> None:
        self.name, self.since = name, since
        # The seconds of phases and compilations within it.
        self.inner = 0.0


class StepRecorder:
    """A recorder of the phases of one thread's training loop.

    The time until the end of the first call of a step's program is start-up.
    All other attributes count what comes after it.

    A window is the time between two moments at which the loop has caught up
    with the devices: all programs that it started have ended. The loop is only
    observed (`jax.Array.is_ready`); nothing waits. The time of each step of a
    window is the window's mean, without compilations, checkpoints and
    evaluations.

    Args:
      has_tokens: Whether the model's integer inputs are sequences of tokens.
      clock: A function that returns the time in seconds.

    Attributes:
      compilations: The compilations, including those of the start-up.
      seconds: The seconds of each phase, without those of phases within it.
        Input and callbacks count if the devices had nothing to compute at
        their end; otherwise, the time is that of the step's program.
      saves: Number of checkpoints.
      shapes: The batches' shapes.
      times: The times of steps.
      inputs: The times that idle devices waited for a batch.
      counts: Numbers of steps, rows and tokens of all windows.
      window_seconds: The seconds of all windows.
      started_at: When the start-up had ended, or None.
      executions: Number of programs that were started.
      note_steps: A function that is called with the number of steps that were
        started so far.
      ahead: Number of programs that were started before the previous one had
        ended.
    """

    def __init__(
        self,
        *,
        has_tokens: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._has_tokens, self._clock = has_tokens, clock
        self._thread = threading.get_ident()
        self.compilations = Compilations(
            self._find_cause, self._note_compiling, clock
        )
        self._reading = threading.local()
        self.began_at = clock()
        self.started_at: float | None = None
        self.shapes: dict[Signature, ShapeCount] = {}
        self.launched = self._pending = (0, 0, 0)
        self._open: list[_Open] = []
        # While a step is started: why a program is compiled, given its name.
        self._cause: Callable[[str], str] | None = None
        self._batch: Signature = ()
        self._batches: set[Signature] = set()
        self.note_steps: Callable[[int], None] = lambda count: None
        self._last: Any = None
        self._reset(self.began_at)

    def _reset(self, now: float) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self.read_seconds = 0.0
        self.saves = self.ahead = self.executions = 0
        self.counts = (0, 0, 0)
        self.times, self.inputs = Histogram(), Histogram()
        self.window_seconds = 0.0
        self.compiled_before = self.compilations.seconds
        self._since, self._since_counts = now, self.launched
        self._left_out = self._count_left_out()
        self._shared = dict(self.seconds), now, self._left_out

    # Called by phases.

    def begin(self, name: str, subject: Any) -> None:
        """Implements `Recorder.begin`."""
        now = self._clock()
        if name == READ:
            self._reading.since = now
        if name == READ or threading.get_ident() != self._thread:
            return
        is_inner = any(phase.name in _OUTER for phase in self._open)
        if name in _OUTER and not is_inner:
            now = self._wait(now)
        self._open.append(_Open(name, now))
        if name == STEP and not is_inner:
            self._begin_execution(subject, now)

    def end(self, name: str, result: Any) -> None:
        """Implements `Recorder.end`."""
        now = self._clock()
        if name == READ:
            self.read_seconds += now - self._reading.since
        if name == READ or threading.get_ident() != self._thread:
            return
        phase = self._open.pop()
        seconds = now - phase.since
        if self._open:
            self._open[-1].inner += seconds
        outer = next((p.name for p in self._open if p.name in _OUTER), None)
        if outer is None:
            self._add(name, seconds - phase.inner)
        else:
            self._open[-1].inner -= seconds - phase.inner
        if outer is None:
            self._end_phase(name, result, now)

    def _end_phase(self, name: str, result: Any, now: float) -> None:
        if name == STEP:
            self.end_step(now)
        elif name == PROGRAM and result is not None:
            leaves = jax.tree.leaves(result[0]) or jax.tree.leaves(result)
            self._last = leaves[0] if leaves else None
        elif name == DEVICE:
            self.close_window(now)
        elif name == SAVE:
            self.saves += 1
        elif name == INPUT and result is not None:
            leaves = jax.tree.leaves(result)
            self._batch = tuple(leaf.shape for leaf in leaves)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds

    # Steps.

    def _begin_execution(self, execution: Execution, now: float) -> None:
        steps = rows = tokens = 0
        for segment in execution.segments:
            known = self.shapes.get(sign(segment))
            if known is None:
                known = self._add_shape(segment)
            known.steps += segment.steps
            steps += segment.steps
            rows += segment.steps * known.rows
            tokens += segment.steps * known.tokens
        cause = functools.partial(self._explain_execution, execution)
        self._begin(cause, (steps, rows, tokens), now)

    def begin_step(self, rows: int, tokens: int) -> None:
        """Begins a step of a loop that is not `fit`.

        Args:
          rows: The number of rows of the step's batch, over all processes.
          tokens: The number of tokens of the batch; 0 if it contains none.
        """
        is_new = self._batch not in self._batches
        if len(self._batches) < _MOST_SHAPES:
            self._batches.add(self._batch)
        cause = functools.partial(_explain_batch, self._batch if is_new else ())
        self._begin(cause, (1, rows, tokens), self._clock())

    def _begin(
        self,
        cause: Callable[[str], str],
        counts: tuple[int, int, int],
        now: float,
    ) -> None:
        self._cause = cause
        self._pending = counts
        self.executions += 1
        is_idle = self._has_caught_up()
        if is_idle:
            self.close_window(now)
        else:
            self.ahead += 1
        if self.started_at is not None:
            self._share_out(now, is_idle=is_idle)

    def _share_out(self, now: float, *, is_idle: bool) -> None:
        """Counts the time since the last program was started.

        If the devices were busy for all of it, the loop lost no time.
        """
        of, left_out = self.seconds, self._count_left_out()
        before, since, left_out_before = self._shared
        if is_idle:
            self.inputs.add(of[INPUT] - before[INPUT], 1)
        else:
            for name in (INPUT, CALLBACKS, STEP):
                of[name] = before[name]
            busy = now - since - (left_out - left_out_before)
            of[PROGRAM] = before[PROGRAM] + busy
            of[PROGRAM] -= of[DEVICE] - before[DEVICE]
        self._shared = dict(of), now, left_out

    def _add_shape(self, segment: Segment) -> ShapeCount:
        shape = describe(segment, has_tokens=self._has_tokens)
        if len(self.shapes) < _MOST_SHAPES:
            self.shapes[sign(segment)] = shape
        return shape

    def end_step(self, now: float) -> None:
        """Ends a step: its programs have been started."""
        self._cause = None
        before = self.launched
        self.launched = _add(self.launched, self._pending)
        self.note_steps(self.launched[0])
        if self.started_at is None and self.launched[0]:
            self.started_at = now
            self._reset(now)
            if not self._has_caught_up():
                # Nearly all of the first step's time is in the first window.
                self._since_counts = before

    def _has_caught_up(self) -> bool:
        is_ready = getattr(self._last, "is_ready", None)
        return is_ready is None or self._last.is_deleted() or is_ready()

    def wait(self) -> None:
        """Waits until all steps have ended."""
        self._wait(self._clock())

    def _wait(self, since: float) -> float:
        """Waits for steps, which are no part of the phase that begins now."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                jax.block_until_ready(self._last)
        now = self._clock()
        self._add(DEVICE, now - since)
        if self._open:
            self._open[-1].inner += now - since
        self.close_window(now)
        return now

    def close_window(self, now: float) -> None:
        """Ends a window: all programs that were started have ended."""
        new = _subtract(self.launched, self._since_counts)
        left_out = self._count_left_out()
        seconds = now - self._since - (left_out - self._left_out)
        if not new[0] or self.started_at is None:
            if not self.counts[0]:
                self._since, self._left_out = now, left_out
            return
        self.times.add(seconds / new[0], new[0])
        self.window_seconds += seconds
        self.counts = _add(self.counts, new)
        self._since, self._since_counts = now, self.launched
        self._left_out = left_out

    def leave_out(self, seconds: float) -> None:
        """Leaves out the last seconds, in which the report itself worked."""
        if self.started_at is not None:
            self.started_at += seconds
        self._since += seconds
        before, since, left_out = self._shared
        self._shared = before, since + seconds, left_out

    def measure_local(self) -> dict[str, Any]:
        """Returns this process's steps and times, for `Heartbeat`."""
        started = self.started_at
        if started is None or not self.counts[0]:
            return {}
        of = self.seconds
        left_out = self._count_left_out() - self.compiled_before
        seconds = self._clock() - started - left_out
        # The rest of the input is a wait for other processes' rows.
        own = min(of[INPUT], self.read_seconds)
        return {
            "steps": self.counts[0],
            "steps_s": seconds,
            "local_s": max(
                seconds - of[PROGRAM] - of[DEVICE] - of[INPUT] + own, 0.0
            ),
            "input_s": own,
        }

    def _count_left_out(self) -> float:
        of = self.seconds
        return of[SAVE] + of[EVALUATE] + self.compilations.seconds

    # Compilations.

    def _note_compiling(self, seconds: float) -> None:
        if self._open:
            self._open[-1].inner += seconds

    def _find_cause(self, program: str) -> str:
        if self._cause is None:
            is_inner = any(phase.name == EVALUATE for phase in self._open)
            where = "evaluation" if is_inner else "outside of steps"
            return f"{where}: {program}"
        return self._cause(program) if self.launched[0] else FIRST

    def _explain_execution(self, execution: Execution, program: str) -> str:
        for segment in execution.segments:
            shape = self.shapes.get(sign(segment))
            if shape is not None and shape.steps == segment.steps:
                others = [s for s in self.shapes.values() if s is not shape]
                return SHAPE + describe_change(shape, others)
        return f"{AGAIN}: {program}"


def _explain_batch(new: Signature, program: str) -> str:
    if new:
        return SHAPE + ", ".join(map(str, new))
    return f"{AGAIN}: {program}"


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _subtract(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
