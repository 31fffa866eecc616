"""ProgramRunner, which runs compiled JAX programs and records progress.

Only programs that run over all processes of the job are counted. All processes
run these programs in the same order, so their counts can be compared: a
process with a lower count than others is behind.
"""

import contextlib
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import jax

from keras_strategies._types import Array, Tree
from keras_strategies.cluster.exchange import host_exchange
from keras_strategies.cluster.exchange.exit_codes import Preempted
from keras_strategies.cluster.exchange.same_program import (
    compare,
    trace_program,
)
from keras_strategies.cluster.user_code import list_frames, locate_frame
from keras_strategies.watchdog.failure_detector import COMPARING, Heartbeat

# The file of JAX that executes a program which has just been compiled.
_EXECUTES = str(PurePath("jax", "_src", "interpreters", "pxla.py"))
# The file and functions of JAX that trace programs.
_PARTIAL_EVAL = str(PurePath("jax", "_src", "interpreters", "partial_eval.py"))
_TRACES = ("trace_to_jaxpr",)
# The file and functions of JAX that compare host values between processes, such
# as the values passed to `device_put`.
_MULTIHOST = str(PurePath("jax", "experimental", "multihost_utils.py"))
_COMPARES = (
    "assert_equal",
    "process_allgather",
    "broadcast_one_to_all",
    "sync_global_devices",
)


class ProgramRunner:
    """A runner of this process's compiled JAX programs that records progress.

    Args:
      num_processes: The number of processes in the job.
      is_preempted: A function that is called with the number of each program
        (the same number in all processes). It returns whether all processes
        must stop before this program. By default, JAX decides.
      clock: A function that returns the time in seconds; tests replace it.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        is_preempted: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_processes = num_processes
        self._is_preempted = is_preempted or _has_reached_sync_point
        self._clock = clock
        self._main = threading.main_thread().ident
        # Usually only one thread at a time starts programs. The thread that
        # sends heartbeats only reads these attributes.
        self._asked = 0
        self.num_started = 0
        self.threads: set[int] = set()
        # While a program is being started: the time when that began, and the id
        # of the thread that starts it.
        self._starting: tuple[float, int] | None = None
        self._executing_since: float | None = None
        self._began = clock()
        self._comparing_since: float | None = None
        self._oldest: _InFlight | None = None
        self._last: _InFlight | None = None
        self.was_preempted = self.was_preempted_in_main = False
        self.is_done = False
        # The number of `PreemptionNotice` contexts that are open. The code in
        # them saves first, and then raises `Preempted` itself.
        self.num_savers = 0
        # `RunReport` measures steps.
        self.measure_steps: Callable[[], Mapping[str, Any]] = dict

    def run(
        self,
        num_processes: int,
        program: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Tree:
        """Runs a compiled program, and records it if all processes run it.

        Args:
          num_processes: The number of processes over which the program runs.
          program: The compiled function.
          args: The arguments of the function.

        Returns:
          The program's outputs.

        Raises:
          Preempted: if one of the processes received SIGTERM. All processes
            raise it once, before the same program. It is not raised inside a
            `PreemptionNotice`, because the code there must first save.
          RuntimeError: if another process is about to run a different program.
        """
        if num_processes != self._num_processes:
            return program(*args)
        self._asked += 1
        self.threads.add(threading.get_ident())
        if not self.was_preempted and self._is_preempted(self._asked):
            self.was_preempted = True
            self.was_preempted_in_main = threading.get_ident() == self._main
            if not self.num_savers:
                self._wait()
                raise Preempted
        with self._in_start():
            traced = trace_program(program, args)
        if traced is not None:
            compare(tuple(range(num_processes)), traced)
        with self._in_start():
            outputs = program(*args)
        self.num_started += 1
        self._note(outputs)
        return outputs

    @contextlib.contextmanager
    def _in_start(self) -> Iterator[None]:
        self._starting = (self._clock(), threading.get_ident())
        try:
            yield
        finally:
            self._starting = self._executing_since = None

    def heartbeat(self, number: int = 0) -> Heartbeat:
        """Returns a heartbeat that describes what this process is doing now.

        Args:
          number: The heartbeat's number.
        """
        now = self._clock()
        flights = [self._oldest, self._last]
        waiting = [now - f.since for f in flights if f and not f.has_ended()]
        starting_s, executing_s = self._measure_starting(now)
        waiting.append(executing_s)
        agrees_in_main, agreeing_s, agreeing = host_exchange.find_wait()
        comparing_s = self._measure_comparing(now)
        if comparing_s:
            agreeing, agreeing_s = COMPARING, comparing_s
        return Heartbeat(
            number=number,
            programs=self.num_started + (executing_s > 0),
            waiting_s=max(waiting),
            starting_s=starting_s,
            agreeing=agreeing,
            agreeing_s=agreeing_s,
            agrees_in_main=agrees_in_main,
            where=locate_frame(list_frames(self._main)),
            is_done=self.is_done,
            **self.measure_steps(),
        )

    def _measure_comparing(self, now: float) -> float:
        """Returns for how many seconds JAX has compared a value over processes.

        When `device_put` places a value on the devices of several processes,
        JAX checks that the value is the same in all of them; `assign` of a
        variable does this, too. For the check, JAX runs a program that does not
        go through this class, so the check is detected by looking at the main
        thread's stack.
        """
        if not _is_in(list_frames(self._main), _MULTIHOST, _COMPARES):
            self._comparing_since = None
            return 0.0
        if self._comparing_since is None:
            self._comparing_since = now
        return now - self._comparing_since

    def _measure_starting(self, now: float) -> tuple[float, float]:
        """Returns how long a compiled program has been starting, or executing.

        The result is a pair of times in seconds, at least one of which is 0.
        Usually a program executes after its call has returned. But on CPU with
        one device in each process, it executes before the call returns.
        """
        starting = self._starting
        if starting is None:
            frames = list_frames(self._main)
            is_tracing = _is_in(frames, _PARTIAL_EVAL, _TRACES)
            return (now - self._began if is_tracing else 0.0), 0.0
        frame = sys._current_frames().get(starting[1])
        if frame is None or not _is_executing(frame):
            self._executing_since = None
            return now - starting[0], 0.0
        if self._executing_since is None:
            is_first = frame.f_code is not ProgramRunner.run.__code__
            self._executing_since = now if is_first else starting[0]
        return 0.0, now - self._executing_since

    def _note(self, outputs: Tree) -> None:
        # The first output (logs, results) is never donated to a later program,
        # so a reference to it does no harm. Other outputs may be donated: if
        # they were referenced here, they would be copied before the donation.
        first = jax.tree.leaves(outputs[0])
        leaves = first or jax.tree.leaves(outputs)
        if not leaves:
            return
        flight = _InFlight(leaves[0], self._clock(), keeps=bool(first))
        # GPUs and TPUs queue programs. The waiting time is that of the oldest
        # program in flight.
        if self._oldest is None or self._oldest.has_ended():
            self._oldest = flight
        self._last = flight

    def _wait(self) -> None:
        """Blocks until the last program has ended. Ignores its errors."""
        if self._last is not None:
            self._last.wait()


class _InFlight:
    """A JAX program that may be executing, observed through an output."""

    def __init__(self, output: Array, since: float, *, keeps: bool) -> None:
        self.since = since
        self._output = output if keeps else None
        self._reference = weakref.ref(output)

    def has_ended(self) -> bool:
        output = self._reference()
        if output is not None:
            # If the output was deleted, it was donated to a later program.
            with contextlib.suppress(RuntimeError):
                if not output.is_deleted() and not output.is_ready():
                    return False
        self._output = None
        return True

    def wait(self) -> None:
        output = self._reference()
        if output is not None:
            with contextlib.suppress(RuntimeError):
                output.block_until_ready()


def _is_executing(frame: types.FrameType) -> bool:
    """Returns whether a program that is being started is already executing.

    After its first call, JAX executes a program from C++, and the innermost
    Python frame is that of `run`. In the first call, JAX executes the program
    from Python code, after compiling it.

    Args:
      frame: The innermost frame of the thread that starts the program.
    """
    code = frame.f_code
    is_first = code.co_filename.endswith(_EXECUTES) and (
        code.co_name == "__call__"
    )
    return is_first or code is ProgramRunner.run.__code__


def _is_in(
    frames: Sequence[types.FrameType], file: str, names: tuple[str, ...]
) -> bool:
    """Returns whether a thread's stack contains a function of a given file.

    Args:
      frames: The frames of the stack.
      file: The end of the file's path.
      names: Prefixes of the function's name, any of which matches.
    """
    codes = (frame.f_code for frame in frames)
    return any(
        code.co_name.startswith(names) and code.co_filename.endswith(file)
        for code in codes
    )


def _has_reached_sync_point(number: int) -> bool:
    # Imported here, so that a script with only one process does not spend time
    # on it.
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.reached_preemption_sync_point(number)
    except RuntimeError:
        # JAX's preemption service is disabled by the option
        # `jax_enable_preemption_service`.
        return False
