"""Traces some steps of a training loop with JAX's profiler."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax

from keras_strategies.names.phases import (
    INPUT,
    PROGRAM,
    recording,
)
from keras_strategies.spmd.batches import Execution

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def profile_steps(
    steps: tuple[int, int] | None,
    directory: str | os.PathLike[str] | None,
    steps_per_execution: int,
) -> Iterator[None]:
    """Traces steps of the training loop that the block runs.

    Args:
      steps: The first and the last step, or None to trace nothing.
      directory: See `StepProfiler`.
      steps_per_execution: See `StepProfiler`.

    Raises:
      ValueError: if there are steps, but no directory.
    """
    if steps is None:
        yield
        return
    if directory is None:
        raise ValueError(
            "`profile` needs a directory for the traces. Pass `directory`, or "
            "a `ks.callbacks.Checkpoint` to `fit`."
        )
    profiler = StepProfiler(*steps, directory, steps_per_execution)
    with recording(profiler):
        try:
            yield
        finally:
            profiler.close()


class StepProfiler:
    """A recorder that traces some steps of one thread's training loop.

    The phases of all threads, such as "input" and "program", are annotated in
    the trace, and the steps as "train". Each process writes its trace to its
    own directory: the clocks of processes differ.

    Args:
      first: The first step to trace, counted from 1.
      last: The last step to trace. Of a program of several steps
        (`steps_per_execution`), all steps are traced.
      directory: The directory in which each process creates a directory.
      steps_per_execution: The number of steps of a program.
    """

    def __init__(
        self,
        first: int,
        last: int,
        directory: str | os.PathLike[str],
        steps_per_execution: int,
    ) -> None:
        self._first, self._last = first, last
        number = jax.process_index()
        self._is_chief = number == 0
        self._directory = os.path.abspath(f"{directory}/process_{number}")
        self._thread = threading.get_ident()
        self._open = threading.local()
        # The number of steps that have begun, and of those of a program.
        self._steps, self._together = 0, steps_per_execution
        self._is_active = self._has_ended = False
        self._step = contextlib.ExitStack()
        self._output: Any = None

    def begin(self, name: str) -> None:
        """Implements `Recorder.begin`."""
        if name == INPUT and threading.get_ident() == self._thread:
            self._begin_step()
        if self._is_active:
            annotation = jax.profiler.TraceAnnotation(name)
            annotation.__enter__()
            self._annotations.append((name, annotation))

    def end(self, name: str, result: Any) -> None:
        """Implements `Recorder.end`."""
        annotations = self._annotations
        if annotations and annotations[-1][0] == name:
            annotations.pop()[1].__exit__(None, None, None)
        if threading.get_ident() != self._thread:
            return
        if name == PROGRAM and result is not None:
            self._output = next(iter(jax.tree.leaves(result[0])), None)
        elif name == INPUT:
            steps = 1
            if isinstance(result, Execution):
                steps = sum(segment.steps for segment in result.segments)
            elif result is None:  # The data are over.
                steps = 0
            self._steps += steps
            self._together = steps or self._together

    @property
    def _annotations(self) -> list[tuple[str, Any]]:
        """The annotations that this thread has entered."""
        return self._open.__dict__.setdefault("annotations", [])

    def _begin_step(self) -> None:
        self._step.close()
        if self._has_ended:
            return
        if self._is_active and self._steps >= self._last:
            self._stop()
        elif not self._is_active and (
            self._steps + self._together >= self._first
        ):
            self._start()
        if self._is_active:
            number = self._steps + 1
            step = jax.profiler.StepTraceAnnotation("train", step_num=number)
            self._step.enter_context(step)

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Calls of Python functions would make most of the trace.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options)
        except Exception as error:
            # Such as another trace, of `keras.callbacks.TensorBoard`.
            self._has_ended = True
            _logger.warning("The steps are not traced: %s", error)
        else:
            self._is_active = True

    def _stop(self) -> None:
        """Ends the trace, after the steps' programs."""
        if self._output is not None:
            with contextlib.suppress(RuntimeError):
                self._output.block_until_ready()
        self._is_active, self._has_ended = False, True
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            _logger.warning("The trace could not be written: %s", error)
            return
        if self._is_chief:
            last = min(self._last, self._steps)
            print(
                f"Steps {self._first} to {last} were traced to "
                f"{self._directory!r}. Open the `.trace.json.gz` file in "
                "https://ui.perfetto.dev, or the directory in TensorBoard with "
                "the plugin xprof.",
                flush=True,
            )

    def close(self) -> None:
        """Ends the trace if the loop has ended before its last step."""
        self._step.close()
        if self._is_active:
            self._stop()
        elif not self._has_ended and self._is_chief:
            _logger.warning(
                "No step was traced: the first one to trace is step %d, but "
                "the fit ended after %d steps. Choose earlier steps.",
                self._first,
                self._steps,
            )
