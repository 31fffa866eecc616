"""The runner of a process's programs, which records their progress.

Only programs over all processes of the job count: all processes run the same
ones in the same order, so their numbers can be compared.
"""

import contextlib
import sys
import sysconfig
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
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
from keras_strategies.cluster.watchdog.failure_detector import Heartbeat

_OURS = str(PurePath(__file__).parents[2])
# Paths of code that is not the user's.
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))

# The file in which JAX runs a program that it has just compiled.
_EXECUTES = str(PurePath("jax", "_src", "interpreters", "pxla.py"))
# The file and functions in which JAX traces.
_PARTIAL_EVAL = str(PurePath("jax", "_src", "interpreters", "partial_eval.py"))
_TRACES = ("trace_to_jaxpr",)
# The file and functions in which JAX compares host values between processes,
# such as those of `device_put`.
_MULTIHOST = str(PurePath("jax", "experimental", "multihost_utils.py"))
_COMPARES = (
    "assert_equal",
    "process_allgather",
    "broadcast_one_to_all",
    "sync_global_devices",
)
_COMPARED = "a value that JAX compares between processes (`assign`)"


class ProgramRunner:
    """A runner of this process's programs, which records their progress.

    Args:
      num_processes: The number of the job's processes.
      is_preempted: A function of the number of each program, which is the
        same in all processes; returns whether all must stop before it.
      clock: A function that returns seconds, which tests replace.
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
        # Mostly one thread at a time starts programs; the watchdog's thread
        # only reads.
        self._asked = 0
        self.num_started = 0
        self.threads: set[int] = set()
        # The time since a program is being started, and the thread's id.
        self._starting: tuple[float, int] | None = None
        self._executing_since: float | None = None
        self._began = clock()
        self._comparing_since: float | None = None
        self._oldest: _InFlight | None = None
        self._last: _InFlight | None = None
        self.was_preempted = self.was_preempted_in_main = False
        self.is_done = False
        # The number of open notices, which save first and raise `Preempted`.
        self.num_savers = 0

    def run(
        self,
        num_processes: int,
        program: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Tree:
        """Calls a program.

        Args:
          num_processes: The number of processes that the program runs over.
          program: The compiled function.
          args: Its arguments.

        Returns:
          The program's outputs.

        Raises:
          Preempted: if one of the processes received SIGTERM; all raise it
            before the same program, once. Not raised if a notice is open,
            which saves first (`num_savers`).
          RuntimeError: if another process is about to run another program.
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
        """Returns this process's activity now, as a heartbeat of a number."""
        now = self._clock()
        flights = [self._oldest, self._last]
        waiting = [now - f.since for f in flights if f and not f.has_ended()]
        starting_s, executing_s = self._measure_starting(now)
        waiting.append(executing_s)
        agreeing, agreeing_s = host_exchange.find_longest_wait()
        comparing_s = self._measure_comparing(now)
        if comparing_s > agreeing_s:
            agreeing, agreeing_s = _COMPARED, comparing_s
        return Heartbeat(
            number=number,
            programs=self.num_started + (executing_s > 0),
            waiting_s=max(waiting),
            starting_s=starting_s,
            agreeing=agreeing,
            agreeing_s=agreeing_s,
            where=locate_thread(self._main),
            is_done=self.is_done,
        )

    def _measure_comparing(self, now: float) -> float:
        """Returns the time JAX has been comparing a host value, in seconds.

        `device_put` of a value to several processes compares it between them,
        and so does `assign` of a variable. JAX runs a separate program for
        this, which this class does not see; only the stack shows it.
        """
        frame = sys._current_frames().get(self._main or 0)
        if not _is_in(frame, _MULTIHOST, _COMPARES):
            self._comparing_since = None
            return 0.0
        if self._comparing_since is None:
            self._comparing_since = now
        return now - self._comparing_since

    def _measure_starting(self, now: float) -> tuple[float, float]:
        """Returns the times a program has been starting and executing.

        Both in seconds; at least one is 0. A program executes before its call
        returns on CPU with one device in each process.
        """
        starting = self._starting
        if starting is None:
            main = sys._current_frames().get(self._main or 0)
            is_tracing = _is_in(main, _PARTIAL_EVAL, _TRACES)
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
        # The first entry (logs, results) is never donated, so it may be kept.
        # Other outputs may not: a program copies state that is referenced
        # elsewhere before it donates it.
        first = jax.tree.leaves(outputs[0])
        leaves = first or jax.tree.leaves(outputs)
        if not leaves:
            return
        flight = _InFlight(leaves[0], self._clock(), keeps=bool(first))
        # GPU and TPU queue programs: the oldest in flight determines the time.
        if self._oldest is None or self._oldest.has_ended():
            self._oldest = flight
        self._last = flight

    def _wait(self) -> None:
        """Blocks until the last program has ended, even with an error."""
        if self._last is not None:
            self._last.wait()


class _InFlight:
    """A program in flight, represented by one of its outputs."""

    def __init__(self, output: Array, since: float, *, keeps: bool) -> None:
        self.since = since
        self._output = output if keeps else None
        self._reference = weakref.ref(output)

    def has_ended(self) -> bool:
        output = self._reference()
        if output is not None:
            # A deleted output was donated to a later program.
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


def locate_thread(thread: int | None) -> str:
    """Returns a thread's position: "train.py:42 in on_batch_end".

    This is the innermost line of user code; without one, the innermost line.

    Args:
      thread: The thread's identifier.
    """
    frame = sys._current_frames().get(thread or 0)
    return locate_frame(frame)


def locate_frame(frame: types.FrameType | None) -> str:
    """Returns a frame's position; see `locate_thread`."""
    innermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        text = f"{PurePath(file).name}:{frame.f_lineno} in "
        text += frame.f_code.co_name
        if is_user_code(file):
            return text
        innermost = innermost or text
        frame = frame.f_back
    return innermost


def _is_executing(frame: types.FrameType) -> bool:
    """Returns whether a program that is being started already executes.

    JAX's fast path executes it from C++, with `run` as the innermost Python
    frame. The first call executes it from JAX's Python, after compiling.
    """
    code = frame.f_code
    is_first = code.co_filename.endswith(_EXECUTES) and (
        code.co_name == "__call__"
    )
    return is_first or code is ProgramRunner.run.__code__


def _is_in(
    frame: types.FrameType | None, file: str, names: tuple[str, ...]
) -> bool:
    """Returns whether a thread is in a function of a file.

    Args:
      frame: The thread's innermost frame.
      file: The end of the file's path.
      names: The beginnings of the functions' names.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith(names) and code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def is_user_code(file: str) -> bool:
    """Returns whether a file is user code, not a library's or ours."""
    if file.startswith((_OURS, "<frozen")):
        return False
    return not any(name in file for name in _LIBRARIES)


def _has_reached_sync_point(number: int) -> bool:
    # Imported here: a process without others need not spend the time.
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.reached_preemption_sync_point(number)
    except RuntimeError:
        # The service is off (`jax_enable_preemption_service`).
        return False
