"""The watchdog of a process of a job: none runs on, or hangs, alone.

A daemon thread that looks only at clocks, at the launcher's pipe and at what
`HeartbeatThread` receives from the other processes. It ends this process with
the cause of a failure. `exit_hooks` sends its own end to the others.
"""

import math
import os
import threading
import time
from typing import Any

import jax

from keras_strategies.cluster.exchange import host_exchange, kv_store
from keras_strategies.cluster.exchange.exit_codes import Cause
from keras_strategies.cluster.watchdog import abort_delay, exit_hooks
from keras_strategies.cluster.watchdog.failure_detector import (
    FailureDetector,
    died,
)
from keras_strategies.cluster.watchdog.heartbeat_thread import (
    HOST,
    AwakeClock,
    HeartbeatThread,
)
from keras_strategies.cluster.watchdog.launcher_pipe import (
    LauncherPipe,
    find_pipe,
)
from keras_strategies.cluster.watchdog.preemption import reset_in_children
from keras_strategies.cluster.watchdog.progress import Progress

HEARTBEAT_S = 10
"""After how many seconds a process that sends no heartbeat is dead.

JAX's heartbeats: they come from a thread of C++, which continues while the
process compiles, or is in a call that lets no thread of Python run."""

INITIALIZE_ARGUMENTS: dict[str, Any] = {
    "heartbeat_timeout_seconds": HEARTBEAT_S,
    "shutdown_timeout_seconds": 60,
}
"""Arguments of `jax.distributed.initialize` with which the documented times
hold."""

_LOOK_S = 0.1
# Between the message of a failure and the end: an error of the same kind
# may be on its way here, with its traceback.
_GRACE_S = 0.4
# So long the store may not answer, or with errors, before a look at its host;
# and before those who were silent already are taken for dead.
_HUNG_S = 0.5
_LOST_S = 1.5
# The others receive a failure in it, and the service is not gone yet.
_SOON_S = 0.6
# Before an abort that nobody's death explains is put down to JAX's service.
_FATAL_S = 3.0
_FATAL = (
    "JAX's coordination service has given the job up, for the reason that its "
    'log says above ("fatal errors"): where a process "unexpectedly tried '
    'to connect", one was started again alone, or another program took its '
    "place. See who reaches process 0's port (docs/clusters.md)"
)
# What may still run when this process ends by itself: other threads, users'
# functions of `atexit`.
_ENDING_S = 5.0
_TELLING_S = 3.0
_POLL_S = 0.05

_starting = threading.Lock()
_watchdog: "Watchdog | None" = None


def start(timeout_s: float | None = None) -> Progress:
    """Starts the watchdog of this process, once. Not collective.

    Called when a strategy over several processes is made. From then on this
    process ends when another one fails, dies or waits for ever, and tells
    the others how it ends itself.

    Args:
      timeout_s: How long a program may run, or be waited for, in seconds;
        None for what `KERAS_STRATEGIES_TIMEOUT_S` says, else 600. A later
        call with a number sets it anew.

    Returns:
      Is to start the programs of this process.
    """
    global _watchdog
    if timeout_s is not None:
        host_exchange.limit_waiting(timeout_s)
    with _starting:
        if _watchdog is None:
            seconds = host_exchange.waiting_limit_s()
            _watchdog = Watchdog(seconds, find_pipe(os.environ))
            _watchdog.start()
            exit_hooks.install(_watchdog)
            # JAX's service has a handler since the job was joined.
            reset_in_children()
        elif timeout_s is not None:
            _watchdog.set_timeout(timeout_s)
        return _watchdog.progress


def is_running() -> bool:
    """Whether this process has a watchdog."""
    return _watchdog is not None


def progress() -> Progress | None:
    """The programs of this process, if it has a watchdog."""
    return None if _watchdog is None else _watchdog.progress


class Watchdog:
    """What `start` starts.

    Args:
      timeout_s: How long a program may run, or be waited for, in seconds.
      pipe: From the launcher, if there is one.
    """

    def __init__(self, timeout_s: float, pipe: LauncherPipe | None) -> None:
        self.process = jax.process_index()
        self.progress = Progress(jax.process_count())
        self._pipe = pipe
        self._clock = AwakeClock()
        self._heartbeats = HeartbeatThread(
            self.process,
            jax.process_count(),
            progress=self.progress,
            detector=FailureDetector(timeout_s=timeout_s),
            clock=self._clock,
        )
        self._cause: Cause | None = None
        self._cause_at = 0.0
        self._own: tuple[str, int] | None = None
        self._end_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="keras_strategies watchdog", daemon=True
        )

    def start(self) -> None:
        """Starts the threads."""
        abort_delay.postpone()
        self._heartbeats.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the threads; a later job of this process has its own."""
        global _watchdog
        self._heartbeats.stop()
        self._stop.set()
        self._thread.join(1.0)
        _watchdog = None

    def set_timeout(self, timeout_s: float) -> None:
        """Says anew how long a program may be waited for."""
        self._heartbeats.detector.timeout_s = timeout_s

    def explain(self) -> None:
        """Looks whether an error of this process is another one's end.

        If so, the watchdog ends this process with the cause meanwhile; it
        returns if all others live. Never waits longer than it takes to
        find a dead one.
        """
        self._heartbeats.suspect()
        end = self._clock.seconds + HEARTBEAT_S
        while self._clock.seconds < end:
            if self._cause is None and self._heartbeats.all_live.is_set():
                return
            time.sleep(_POLL_S)

    def fail(self, text: str, code: int, cause: Cause) -> None:
        """This process begins to end by itself.

        Args:
          text: Why, for its own last line.
          code: Its exit code.
          cause: What is sent to the others.
        """
        self._end_at = self._clock.seconds + _ENDING_S
        self._own = (text, code)
        self._heartbeats.send(cause)

    def end_soon(self) -> None:
        """After `fail`: does not wait for the end of the script."""
        if self._own is not None:
            self._end_at = self._clock.seconds + _SOON_S

    def end_failed(self) -> None:
        """Ends this process, which `fail` was called in, if it was."""
        if self._own is None:
            return
        end = self._clock.seconds + _TELLING_S
        # Who hosts the store stays until the others have read it.
        event = self._heartbeats.has_sent
        if self.process == HOST:
            event = self._heartbeats.all_received
        while not event.is_set() and self._clock.seconds < end:
            event.wait(_POLL_S)
        # They end a moment after they have received it: the service stays.
        if self.process == HOST:
            time.sleep(2 * _GRACE_S)
        exit_hooks.end(self.process, *self._own)

    def wait_for_others(self) -> None:
        """Waits, with this process's script done, for those of the others.

        If one of them fails, the watchdog ends this process meanwhile.
        """
        self.progress.is_done = True
        self._heartbeats.hurry()
        while not self._heartbeats.is_over.wait(_POLL_S):
            if self._heartbeats.has_left:
                return
        end = self._clock.seconds + _TELLING_S
        while self.process == HOST and self._clock.seconds < end:
            if self._heartbeats.all_received.wait(_POLL_S):
                return

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._clock.tick()
            if self._heartbeats.has_left or self._heartbeats.is_over.is_set():
                continue
            if self._own is not None:
                if self._clock.seconds > self._end_at:
                    exit_hooks.end(self.process, *self._own)
                continue
            self._look()
            # Who hosts the store goes last.
            grace_s = _GRACE_S * (2 if self.process == HOST else 1)
            waited = self._clock.seconds - self._cause_at
            if self._cause is not None and waited > grace_s:
                exit_hooks.end(self.process, self._cause.text, self._cause.code)

    def _look(self) -> None:
        line = self._pipe.read() if self._pipe is not None else None
        if line is not None:
            # It ends the processes in a moment.
            self._note(Cause(text=line))
            self._cause_at = -math.inf
            self._pipe = None
        elif self._cause is None:
            found = self._heartbeats.cause or self._find_lost()
            if found is not None:
                self._note(found)

    def _note(self, cause: Cause) -> None:
        if self._cause is None:
            self._cause, self._cause_at = cause, self._clock.seconds

    def _find_lost(self) -> Cause | None:
        """The dead processes, as far as JAX's coordination service knows.

        Where it takes a process for dead, it ends the others; `aborts` keeps
        them for a moment, in which the store does not answer.
        """
        hung_s = self._heartbeats.hung_s()
        if max(hung_s, self._heartbeats.failing_s()) < _HUNG_S:
            return None
        if self.process != HOST and not kv_store.is_reachable():
            return Cause(
                text=f"process {HOST} died: JAX's coordination service, which "
                "it hosts, is gone"
            )
        silent = self._heartbeats.silent
        if silent and hung_s > _LOST_S:
            return died(silent, "JAX got no heartbeat from there")
        if self.process != HOST and hung_s > HEARTBEAT_S:
            return died(
                [HOST],
                "JAX's coordination service, which it hosts, has not answered "
                f"for {HEARTBEAT_S} s",
            )
        if hung_s > _FATAL_S and abort_delay.is_aborting():
            if self.process != HOST and not kv_store.is_speaking():
                # JAX noticed it a moment earlier than the line above.
                return died(
                    [HOST],
                    "JAX's coordination service, which it "
                    "hosts, does not answer",
                )
            return Cause(text=_FATAL)
        return None
