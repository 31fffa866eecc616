"""Records the time that a training loop spends in each phase of its steps."""

import contextlib
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import jax

from keras_strategies.names.phases import (
    CALLBACKS,
    DEVICE,
    EVALUATE,
    INPUT,
    PROGRAM,
    READ,
    SAVE,
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
from keras_strategies.spmd.batches import Execution, Segment

_MOST_SHAPES = 1000
_PHASES = (INPUT, PROGRAM, DEVICE, CALLBACKS, SAVE, EVALUATE)
_OUTER = (SAVE, EVALUATE)
"""Phases in which no others are counted."""

FIRST = "the first step"
SHAPE = "a new shape: "
AGAIN = "a step, for the same shapes"


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
      left_out: The seconds of compilations, checkpoints and evaluations,
        including those of the start-up.
      saves: Number of checkpoints.
      shapes: The shapes of the batches of `fit`.
      rows: Number of rows, of other loops.
      tokens: Number of tokens, of other loops.
      launched: Number of steps that were started.
      times: The times of steps.
      inputs: The times that idle devices waited for a batch.
      steps: Number of steps of all windows.
      window_seconds: The seconds of all windows.
      started_at: When the start-up had ended, or None.
      executions: Number of programs that were started.
      ahead: Number of programs that were started before the previous one had
        ended.
      note_steps: A function that is called with the number of steps that were
        started so far.
    """

    def __init__(
        self,
        *,
        has_tokens: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._has_tokens, self._clock = has_tokens, clock
        self._thread = get_ident()
        self.compilations = Compilations(
            self._find_cause, self._note_compiling, clock
        )
        self._reading = threading.local()
        self.began_at = clock()
        self.started_at: float | None = None
        self.shapes: dict[Signature, ShapeCount] = {}
        self.launched = self._pending = self.rows = self.tokens = 0
        self.left_out = 0.0
        self.note_steps: Callable[[int], None] = lambda count: None
        # The phases that have begun: their names, when they began, and the
        # seconds of compilations and of phases within them.
        self._open: list[list[Any]] = []
        self._num_outer = 0
        # An output of the program that was started last.
        self._last: Any = None
        # While a step is started: its execution, or the new shapes of a batch
        # of another loop than `fit`.
        self._is_loop = False
        self._subject: Execution | Signature | None = None
        self._batch: Signature = ()
        self._batches: set[Signature] = set()
        self._reset(self.began_at)

    def _reset(self, now: float) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self.read_seconds = 0.0
        self.saves = self.ahead = self.executions = self.steps = 0
        self.times, self.inputs = Histogram(), Histogram()
        self.window_seconds = 0.0
        self.left_out_before = self.left_out
        self.compiled_before = self.compilations.seconds
        self._since, self._since_steps = now, self.launched
        self._since_left_out = self.left_out
        self._start, self._start_at = self.seconds.copy(), now
        self._start_left_out = self.left_out

    # Called by phases. These methods run several times in each step.

    def begin(self, name: str) -> None:
        """Implements `Recorder.begin`."""
        now = self._clock()
        if name == READ:
            self._reading.since = now
            return
        if get_ident() != self._thread:
            return
        if name in _OUTER:
            if not self._num_outer:
                now = self._wait(now)
            self._num_outer += 1
        self._open.append([name, now, 0.0])

    def end(self, name: str, result: Any) -> None:
        """Implements `Recorder.end`."""
        now = self._clock()
        if name == READ:
            self.read_seconds += now - self._reading.since
            return
        if get_ident() != self._thread:
            return
        open_phases = self._open
        _, since, inner = open_phases.pop()
        if name in _OUTER:
            self._num_outer -= 1
        if self._num_outer:
            # It is a part of the outer phase.
            open_phases[-1][2] += inner
            return
        spent = now - since
        self.seconds[name] += spent - inner
        if open_phases:
            open_phases[-1][2] += spent
        if name == PROGRAM:
            self._last = _take_output(result)
            if self._pending and not self._is_loop:
                self._launch(now)
        elif name == INPUT:
            self._end_input(result, now)
        elif name == DEVICE:
            self._close_window(now)
        elif name in _OUTER:
            self.left_out += spent - inner
            self.saves += name == SAVE

    def _end_input(self, result: Any, now: float) -> None:
        if isinstance(result, Execution):
            if self._pending:
                # It ran no program, as in eager mode.
                self._launch(now)
            self._begin_execution(result, now)
        else:
            leaves = jax.tree.leaves(result)
            self._batch = tuple(leaf.shape for leaf in leaves)

    # Steps.

    def _begin_execution(self, execution: Execution, now: float) -> None:
        steps = 0
        for segment in execution.segments:
            key = sign(segment)
            known = self.shapes.get(key) or self._add_shape(key, segment)
            known.steps += segment.steps
            steps += segment.steps
        self._subject = execution
        self._begin(steps, now)

    def begin_step(self, rows: int, tokens: int) -> None:
        """Begins a step of a loop that is not `fit`.

        Args:
          rows: The number of rows of the step's batch, over all processes.
          tokens: The number of tokens of the batch; 0 if it contains none.
        """
        is_new = self._batch not in self._batches
        if len(self._batches) < _MOST_SHAPES:
            self._batches.add(self._batch)
        self._subject = self._batch if is_new else ()
        self._is_loop = True
        self.rows += rows
        self.tokens += tokens
        self._begin(1, self._clock())

    def end_step(self) -> None:
        """Ends a step of a loop that is not `fit`."""
        self._launch(self._clock())
        self._subject, self._is_loop = None, False

    def _begin(self, steps: int, now: float) -> None:
        self._pending = steps
        self.executions += 1
        of = self.seconds
        if self._has_caught_up():
            self._close_window(now)
            if self.started_at is not None:
                self.inputs.add(of[INPUT] - self._start[INPUT], 1)
        else:
            self.ahead += 1
            if self.started_at is not None:
                self._hide(now)
        self._start, self._start_at = of.copy(), now
        self._start_left_out = self.left_out

    def _hide(self, now: float) -> None:
        """Counts the time since the last program as that of the devices.

        They were busy for all of it, so the loop lost no time.
        """
        of, start = self.seconds, self._start
        of[INPUT], of[CALLBACKS] = start[INPUT], start[CALLBACKS]
        busy = now - self._start_at - (self.left_out - self._start_left_out)
        of[PROGRAM] = start[PROGRAM] + busy - (of[DEVICE] - start[DEVICE])

    def _add_shape(self, key: Signature, segment: Segment) -> ShapeCount:
        shape = describe(segment, has_tokens=self._has_tokens)
        if len(self.shapes) < _MOST_SHAPES:
            self.shapes[key] = shape
        return shape

    def _launch(self, now: float) -> None:
        """Counts the steps whose programs have been started."""
        before = self.launched
        self.launched += self._pending
        self._pending = 0
        self.note_steps(self.launched)
        if self.started_at is None and self.launched:
            self.started_at = now
            self._reset(now)
            if not self._has_caught_up():
                # Nearly all of the first step's time is in the first window.
                self._since_steps = before

    def _has_caught_up(self) -> bool:
        last = self._last
        return last is None or last.is_deleted() or last.is_ready()

    def wait(self) -> None:
        """Waits until all steps have ended."""
        self._wait(self._clock())

    def _wait(self, since: float) -> float:
        """Waits for steps, which are no part of the phase that begins now."""
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.block_until_ready()
        now = self._clock()
        self.seconds[DEVICE] += now - since
        if self._open:
            self._open[-1][2] += now - since
        self._close_window(now)
        return now

    def close_window(self) -> float:
        """Ends a window: all programs that were started have ended.

        Returns:
          The time.
        """
        now = self._clock()
        if self._pending and not self._is_loop:
            self._launch(now)
        self._subject = None
        self._close_window(now)
        return now

    def _close_window(self, now: float) -> None:
        new = self.launched - self._since_steps
        if new and self.started_at is not None:
            left_out = self.left_out - self._since_left_out
            seconds = now - self._since - left_out
            self.times.add(seconds / new, new)
            self.window_seconds += seconds
            self.steps += new
        elif self.steps:
            return
        self._since, self._since_steps = now, self.launched
        self._since_left_out = self.left_out

    def leave_out(self, seconds: float) -> None:
        """Leaves out the last seconds, in which the report itself worked."""
        if self.started_at is not None:
            self.started_at += seconds
        self._since += seconds
        self._start_at += seconds
        if self._open:
            self._open[-1][2] += seconds

    def measure_local(self) -> dict[str, Any]:
        """Returns this process's steps and times, for `Heartbeat`."""
        started = self.started_at
        if started is None or not self.steps:
            return {}
        of = self.seconds
        left_out = self.left_out - self.left_out_before
        seconds = self._clock() - started - left_out
        # The rest of the input is a wait for other processes' rows.
        own = min(of[INPUT], self.read_seconds)
        return {
            "steps": self.steps,
            "steps_s": seconds,
            "local_s": max(
                seconds - of[PROGRAM] - of[DEVICE] - of[INPUT] + own, 0.0
            ),
            "input_s": own,
        }

    # Compilations.

    def _note_compiling(self, seconds: float) -> None:
        self.left_out += seconds
        if self._open:
            self._open[-1][2] += seconds

    def _find_cause(self, program: str) -> str:
        subject = self._subject
        is_step = self._is_loop or any(p[0] == PROGRAM for p in self._open)
        if subject is None or self._num_outer or not is_step:
            where = "evaluation" if self._num_outer else "outside of steps"
            return f"{where}: {program}"
        if not self.launched:
            return FIRST
        if isinstance(subject, Execution):
            for segment in subject.segments:
                shape = self.shapes.get(sign(segment))
                if shape is not None and shape.steps == segment.steps:
                    others = [s for s in self.shapes.values() if s is not shape]
                    return SHAPE + describe_change(shape, others)
        elif subject:
            return SHAPE + ", ".join(map(str, subject))
        return f"{AGAIN}: {program}"


def _take_output(result: Any) -> Any:
    """Returns an output of a program that is never donated, or None."""
    if result is None:
        return None
    first = result[0]
    if type(first) is dict:
        output = next(iter(first.values()), None)
        if hasattr(output, "is_ready"):
            return output
    leaves = jax.tree.leaves(first) or jax.tree.leaves(result)
    return leaves[0] if leaves else None
