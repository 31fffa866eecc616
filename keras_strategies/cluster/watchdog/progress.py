"""The progress of this process: written where programs start, then watched.

Only programs over all processes of the job count: they are the same in all,
in one order, so their numbers can be compared.
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
from keras_strategies.cluster.exchange.same_program import compare, traced
from keras_strategies.cluster.watchdog.failure_detector import Heartbeat

_OURS = str(PurePath(__file__).parents[2])
# No user's code; sub-folders of the last one are site-packages mostly.
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))

# Where JAX runs a program that it has just compiled.
_EXECUTES = str(PurePath("jax", "_src", "interpreters", "pxla.py"))
# Where JAX traces functions.
_PARTIAL_EVAL = str(PurePath("jax", "_src", "interpreters", "partial_eval.py"))
_TRACES = ("trace_to_jaxpr",)
# Where JAX compares what `device_put` is given, and others with their own.
_MULTIHOST = str(PurePath("jax", "experimental", "multihost_utils.py"))
_COMPARES = (
    "assert_equal",
    "process_allgather",
    "broadcast_one_to_all",
    "sync_global_devices",
)
_COMPARED = "a value that JAX compares between processes (`assign`)"


class Progress:
    """The programs of this process.

    Args:
      num_processes: How many processes the job has.
      is_preempted: Asked with the number of each program, which is the same
        in all processes: whether all stop before it.
      clock: Seconds, for tests.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        is_preempted: Callable[[int], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_processes = num_processes
        self._is_preempted = is_preempted or _reached_sync_point
        self._clock = clock
        self._main = threading.main_thread().ident
        # Programs are started by one thread at a time, mostly; the watchdog's
        # only reads.
        self._asked = 0
        self.num_started = 0
        self.threads: set[int] = set()
        # Since when a program is being started, and by which thread.
        self._starting: tuple[float, int] | None = None
        self._executing_since: float | None = None
        self._began = clock()
        self._comparing_since: float | None = None
        self._oldest: _InFlight | None = None
        self._last: _InFlight | None = None
        self.was_preempted = self.was_preempted_in_main = False
        self.is_done = False
        # Who saves first, and raises `Preempted` then.
        self.num_savers = 0

    def start(
        self,
        num_processes: int,
        program: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> Tree:
        """Calls a program over so many processes.

        Returns:
          Its outputs, as the program returns them.

        Raises:
          Preempted: one of the processes got SIGTERM; all raise it before
            the same program. It is raised once, and not where somebody wants
            to save first (`num_savers`).
          RuntimeError: another process is about to run another program.
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
            new = traced(program, args)
        if new is not None:
            compare(tuple(range(num_processes)), new)
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
        """What this process does now, as its beat of this number."""
        now = self._clock()
        flights = [self._oldest, self._last]
        waiting = [now - f.since for f in flights if f and not f.has_ended()]
        starting_s, executing_s = self._starting_s(now)
        waiting.append(executing_s)
        agreeing, agreeing_s = host_exchange.longest_wait()
        comparing_s = self._comparing_s(now)
        if comparing_s > agreeing_s:
            agreeing, agreeing_s = _COMPARED, comparing_s
        return Heartbeat(
            number=number,
            programs=self.num_started + (executing_s > 0),
            waiting_s=max(waiting),
            starting_s=starting_s,
            agreeing=agreeing,
            agreeing_s=agreeing_s,
            where=where_is(self._main),
            is_done=self.is_done,
        )

    def _comparing_s(self, now: float) -> float:
        """For how long JAX compares a value of the host between processes.

        It does so where `device_put` spreads one, and so does `assign` of a
        variable; with a program of its own, that nobody is told of.
        """
        frame = sys._current_frames().get(self._main or 0)
        if not _is_in(frame, _MULTIHOST, _COMPARES):
            self._comparing_since = None
            return 0.0
        if self._comparing_since is None:
            self._comparing_since = now
        return now - self._comparing_since

    def _starting_s(self, now: float) -> tuple[float, float]:
        """For how long a program is being started, or runs before the call
        returns: XLA does that on CPU with one device in each process."""
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
            is_first = frame.f_code is not Progress.start.__code__
            self._executing_since = now if is_first else starting[0]
        return 0.0, now - self._executing_since

    def _note(self, outputs: Tree) -> None:
        # The first entry (logs, results) is donated to no program. Of another
        # one nothing may be kept: a program looks who else holds its state.
        first = jax.tree.leaves(outputs[0])
        leaves = first or jax.tree.leaves(outputs)
        if not leaves:
            return
        flight = _InFlight(leaves[0], self._clock(), keeps=bool(first))
        # GPU and TPU queue programs: the oldest in flight shows how long.
        if self._oldest is None or self._oldest.has_ended():
            self._oldest = flight
        self._last = flight

    def _wait(self) -> None:
        """Until the last program has ended, whatever became of it."""
        if self._last is not None:
            self._last.wait()


class _InFlight:
    """A program that was started, known by one of its outputs."""

    def __init__(self, output: Array, since: float, *, keeps: bool) -> None:
        self.since = since
        self._output = output if keeps else None
        self._reference = weakref.ref(output)

    def has_ended(self) -> bool:
        output = self._reference()
        if output is not None:
            # One that is deleted was donated to a later program.
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


def where_is(thread: int | None) -> str:
    """Where a thread's code is: "train.py:42 in on_batch_end".

    The innermost of the user's lines; without one, the innermost line.

    Args:
      thread: Its identifier.
    """
    frame = sys._current_frames().get(thread or 0)
    return where_in(frame)


def where_in(frame: types.FrameType | None) -> str:
    """As `where_is`, of a frame."""
    shown = ""
    while frame is not None:
        file = frame.f_code.co_filename
        text = f"{PurePath(file).name}:{frame.f_lineno} in "
        text += frame.f_code.co_name
        if is_users(file):
            return text
        shown = shown or text
        frame = frame.f_back
    return shown


def _is_executing(frame: types.FrameType) -> bool:
    """Whether a program that is being started runs already.

    JAX's fast path calls it from C++; the first time its Python does, when
    all is compiled.
    """
    code = frame.f_code
    is_first = code.co_filename.endswith(_EXECUTES) and (
        code.co_name == "__call__"
    )
    return is_first or code is Progress.start.__code__


def _is_in(
    frame: types.FrameType | None, file: str, names: tuple[str, ...]
) -> bool:
    """Returns whether a thread is in a function of a file.

    Args:
      frame: The thread's innermost frame.
      file: How the file's path ends.
      names: How the functions' names begin.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith(names) and code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def is_users(file: str) -> bool:
    """Whether a file is the user's: no library's, nor ours."""
    if file.startswith((_OURS, "<frozen")):
        return False
    return not any(name in file for name in _LIBRARIES)


def _reached_sync_point(number: int) -> bool:
    # Importing it takes time that one process without others need not spend.
    from jax.experimental import multihost_utils

    try:
        return multihost_utils.reached_preemption_sync_point(number)
    except RuntimeError:
        # The service is off (`jax_enable_preemption_service`).
        return False
