"""Records the time that a training loop spends in each phase of its steps."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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
    REPORT,
    SAVE,
    recording,
)
from keras_strategies.reporting.advice import AGAIN, EXECUTION, FIRST, SHAPE
from keras_strategies.reporting.shapes import (
    ShapeCount,
    Signature,
    describe,
    describe_change,
    sign,
)
from keras_strategies.spmd.batches import Execution, Segment

_MAX_SHAPES = 1000
_MAX_CAUSES = 100
_MAX_LENGTH = 200
_OTHERS = "other programs"
# JAX's events of a program that is traced, lowered and compiled.
_EVENTS = "/jax/core/compile/"
_COMPILED = "/jax/core/compile/backend_compile_duration"

COMPILE = "compile"
"""Tracing, lowering and compiling, in any phase."""

# Phases in which no others are counted.
_OUTER = (SAVE, EVALUATE, REPORT)


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
      compiled: Number of compiled programs by their causes, including those of
        the start-up.
      compile_seconds: Seconds of tracing, lowering and compiling by the same
        causes.
      left_out: The seconds of phases that are no part of a step's time.
      seconds: The seconds of each phase, without those of phases within it.
        Input and callbacks count if the devices had nothing to compute at
        their end; otherwise, the time is that of the step's program.
      saves: Number of checkpoints.
      shapes: The shapes of the batches.
      launched: Number of steps that were started.
      first_steps: Number of steps of the start-up.
      times: The numbers of steps by their time, with three digits.
      steps: Number of steps of all windows.
      window_seconds: The seconds of all windows.
      started_at: When the start-up had ended, or None.
      executions: Number of programs that were started.
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
        self._thread = get_ident()
        self.compiled = collections.Counter[str]()
        self.compile_seconds = collections.defaultdict[str, float](float)
        # Tracing a program traces the programs that it calls: of the latest
        # events, the times when they began, and their seconds.
        self._nested: list[tuple[float, float]] = []
        self._reading = threading.local()
        self.began_at = clock()
        self.started_at: float | None = None
        self.shapes: dict[Signature, ShapeCount] = {}
        self.launched = self._pending = 0
        # Called when steps were started.
        self.note_steps: Callable[[], None] = lambda: None
        # The phases that have begun: their names, when they began, and the
        # seconds of compilations and of phases within them.
        self._open: list[list[Any]] = []
        self._num_outer = 0
        # An output of the program that was started last.
        self._last: Any = None
        # The batches of the step that is started, with their numbers of steps.
        self._subject: list[tuple[ShapeCount, int]] = []
        # Of another loop than `fit`: the shapes of the batch, and whether it is
        # in a step.
        self._batch: Signature = ()
        self._is_loop = False
        self._reset(self.began_at)

    def _reset(self, now: float) -> None:
        self.seconds = collections.defaultdict[str, float](float)
        self.read_seconds = self.window_seconds = 0.0
        self.saves = self.ahead = self.executions = self.steps = 0
        self.first_steps = self.launched
        self.times = collections.Counter[float]()
        # The number of steps and the time of the loop at the beginning of a
        # window; this time and the phases' seconds when a program was started.
        self.left_out = 0.0
        self._window = self.launched, now
        self._start = now, self.seconds.copy()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to phases and to JAX's events while the block runs."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        try:
            with recording(self):
                yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._hear)

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
                now = self.wait()
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
        self._num_outer -= name in _OUTER
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
            self.saves += name == SAVE and result is not None

    def _end_input(self, result: Any, now: float) -> None:
        if isinstance(result, Execution):
            self._subject = []
            if self._pending:
                # It ran no program, as in eager mode.
                self._launch(now)
            for segment in result.segments:
                self._add(sign(segment), segment.steps, segment)
            self._begin(sum(s.steps for s in result.segments), now)
        else:
            self._batch = tuple(leaf.shape for leaf in jax.tree.leaves(result))

    # Steps.

    def begin_step(self, rows: int, tokens: int) -> None:
        """Begins a step of a loop that is not `fit`.

        Args:
          rows: The number of rows of the step's batch, over all processes.
          tokens: The number of tokens of the batch; 0 if it contains none.
        """
        self._is_loop = True
        text = {f"x[{i}]": shape for i, shape in enumerate(self._batch)}
        batch = ShapeCount(text=text, rows=rows, tokens=tokens)
        self._add((*self._batch, (rows, tokens)), 1, batch)
        self._begin(1, self._clock())

    def end_step(self) -> None:
        """Ends a step of a loop that is not `fit`."""
        self._launch(self._clock())
        self._subject, self._is_loop = [], False

    def _begin(self, steps: int, now: float) -> None:
        self._pending = steps
        self.executions += 1
        if self._has_caught_up():
            self._close_window(now)
        else:
            self.ahead += 1
            if self.started_at is not None:
                self._hide(now)
        self._start = now - self.left_out, self.seconds.copy()

    def _hide(self, now: float) -> None:
        """Counts the time since the last program as that of the devices.

        They were busy for all of it, so the loop lost no time.
        """
        of, (since, before) = self.seconds, self._start
        of[INPUT], of[CALLBACKS] = before[INPUT], before[CALLBACKS]
        busy = now - self.left_out - since
        of[PROGRAM] = before[PROGRAM] + busy - (of[DEVICE] - before[DEVICE])

    def _add(
        self, key: Signature, steps: int, batch: Segment | ShapeCount
    ) -> None:
        shape = self.shapes.get(key, batch)
        if isinstance(shape, Segment):
            shape = describe(shape, has_tokens=self._has_tokens)
        if len(self.shapes) < _MAX_SHAPES:
            self.shapes[key] = shape
        shape.steps += steps
        self._subject.append((shape, steps))

    def _launch(self, now: float) -> None:
        """Counts the steps whose programs have been started."""
        before = self.launched
        self.launched += self._pending
        self._pending = 0
        self.note_steps()
        if self.started_at is None and self.launched:
            self.started_at = now
            self._reset(now)
            if not self._has_caught_up():
                # Nearly all of the first step's time is in the first window.
                self._window = before, now

    def _has_caught_up(self) -> bool:
        last = self._last
        return last is None or last.is_deleted() or last.is_ready()

    def wait(self) -> float:
        """Waits until all steps have ended, and returns the time then.

        The wait is no part of a phase that begins afterwards.
        """
        since = self._clock()
        if self._last is not None:
            with contextlib.suppress(RuntimeError):
                self._last.block_until_ready()
        now = self._clock()
        if self._pending and not self._is_loop:
            # It ran no program, as in eager mode.
            self._launch(now)
            since = now
        self._subject = []
        self.seconds[DEVICE] += now - since
        if self._open:
            self._open[-1][2] += now - since
        self._close_window(now)
        return now

    def _close_window(self, now: float) -> None:
        steps, since = self._window
        new = self.launched - steps
        if new and self.started_at is not None:
            seconds = now - self.left_out - since
            self.times[float(f"{seconds / new:.3g}")] += new
            self.window_seconds += seconds
            self.steps += new
        elif self.steps:
            return
        self._window = self.launched, now - self.left_out

    def measure_local(self) -> dict[str, Any]:
        """Returns this process's steps and times, for `Heartbeat`."""
        started, of = self.started_at, self.seconds
        if started is None or not self.steps:
            return {}
        seconds = self._clock() - started - self.left_out
        # The rest of the input is a wait for other processes' rows.
        own = min(of[INPUT], self.read_seconds)
        local = seconds - of[PROGRAM] - of[DEVICE] - of[INPUT] + own
        return {
            "steps": self.steps,
            "steps_s": seconds,
            "local_s": max(local, 0.0),
            "input_s": own,
        }

    # Compilations.

    def _hear(
        self, event: str, duration_secs: float, **kwargs: str | int
    ) -> None:
        if get_ident() != self._thread or not event.startswith(_EVENTS):
            return
        cause = self._find_cause(str(kwargs.get("fun_name", "a program")))
        if cause is None:
            return
        began, new = self._clock() - duration_secs, duration_secs
        while self._nested and self._nested[-1][0] >= began:
            new -= self._nested.pop()[1]
        self._nested = [*self._nested[-_MAX_CAUSES:], (began, duration_secs)]
        new = max(new, 0.0)
        if len(cause) > _MAX_LENGTH:
            # A batch may have hundreds of arrays.
            cause = f"{cause[:_MAX_LENGTH]}..."
        known = self.compile_seconds
        if len(known) >= _MAX_CAUSES and cause not in known:
            cause = _OTHERS
        self.compiled[cause] += event == _COMPILED
        self.compile_seconds[cause] += new
        self.seconds[COMPILE] += new
        self.left_out += new
        if self._open:
            self._open[-1][2] += new

    def _find_cause(self, program: str) -> str | None:
        names = {phase[0] for phase in self._open}
        if REPORT in names:
            return None
        if self._num_outer:
            return f"evaluation: {program}"
        if not self._subject or not (self._is_loop or PROGRAM in names):
            return f"outside of steps: {program}"
        if not self.launched:
            return FIRST
        for shape, steps in self._subject:
            if shape.steps == steps:
                others = [s for s in self.shapes.values() if s is not shape]
                change = describe_change(shape, others)
                if change:
                    return f"{SHAPE}{change}"
                return f"{EXECUTION}{steps} step{'s' * (steps > 1)}"
        return f"{AGAIN}: {program}"


def _take_output(result: Any) -> Any:
    """Returns an output of a program that is never donated, or None."""
    if result is None:
        return None
    leaves = jax.tree.leaves(result[0]) or jax.tree.leaves(result)
    return next((leaf for leaf in leaves if hasattr(leaf, "is_ready")), None)
