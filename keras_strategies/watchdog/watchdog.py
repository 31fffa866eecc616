"""The watchdog, which ends this process if another process dies or hangs.

The watchdog is a daemon thread. It makes no calls that may hang: it reads
clocks, the launcher's pipe, and the messages that `HeartbeatThread` has
received from the key-value store of JAX's coordination service. Only if the
store does not answer does the watchdog try to connect to the store's host, with
a short timeout. When it ends this process, it prints the cause. If this process
itself fails or ends, `exit_hooks` reports that to the other processes.
"""

import math
import os
import threading
import time
from typing import Any

from keras_strategies.cluster.exchange import host_exchange, kv_store
from keras_strategies.cluster.exchange.exit_codes import Cause
from keras_strategies.watchdog import abort_delay, exit_hooks
from keras_strategies.watchdog.failure_detector import (
    HOST,
    FailureDetector,
    Heartbeat,
    make_death_cause,
)
from keras_strategies.watchdog.heartbeat_thread import (
    AwakeClock,
    HeartbeatThread,
)
from keras_strategies.watchdog.launcher_pipe import (
    LauncherPipe,
    find_pipe,
)
from keras_strategies.watchdog.preemption import reset_in_children
from keras_strategies.watchdog.progress import ProgramRunner

HEARTBEAT_S = 10
"""The timeout of JAX's own heartbeats, in seconds.

A C++ thread sends these heartbeats. It also runs while the process compiles or
is in a call that holds the GIL."""

INITIALIZE_ARGUMENTS: dict[str, Any] = {
    "heartbeat_timeout_seconds": HEARTBEAT_S,
    "shutdown_timeout_seconds": 60,
}
"""Arguments for `jax.distributed.initialize`.

The documented times for detecting failures hold only with these timeouts."""

_LOOK_S = 0.1
# The time between the message about a failure and the end of this process. In
# this time the same error may be raised in this process, with a traceback.
_GRACE_S = 0.4
# How long the key-value store may hang or fail before this process tries to
# connect to the store's host, and before it considers silent processes dead.
_HUNG_S = 0.5
_LOST_S = 1.5
# The delay of `end_soon`: long enough for the other processes to receive the
# message about a failure while JAX's service still runs.
_SOON_S = 0.6
# How long this process may continue after its failure, to run other threads
# and users' `atexit` functions.
_ENDING_S = 5.0
_SENDING_S = 3.0
_POLL_S = 0.05

_starting = threading.Lock()
_watchdog: "Watchdog | None" = None


def start(timeout_s: float | None = None) -> ProgramRunner:
    """Starts this process's watchdog if it is not running. Not collective.

    This is called when a process joins its job, or when a strategy over several
    processes is created. From then on, this process ends when another process
    fails, dies or hangs, and it reports its own end to the others.

    Args:
      timeout_s: The maximum duration of a JAX program, and of a wait for other
        processes, in seconds. None: the value of the environment variable
        `KERAS_STRATEGIES_TIMEOUT_S`, or 600. A later call with a number
        replaces the timeout.

    Returns:
      The `ProgramRunner` with which this process must start all its programs.
    """
    global _watchdog
    if timeout_s is not None:
        host_exchange.limit_waiting(timeout_s)
    with _starting:
        if _watchdog is None:
            seconds = host_exchange.read_waiting_limit()
            _watchdog = Watchdog(seconds, find_pipe(os.environ))
            _watchdog.start()
            exit_hooks.install(_watchdog)
            # When this process joined the job, JAX installed a signal handler.
            reset_in_children()
        elif timeout_s is not None:
            _watchdog.detector.timeout_s = timeout_s
        return _watchdog.runner


def get_runner() -> ProgramRunner | None:
    """Returns this process's `ProgramRunner`; None without a watchdog."""
    return None if _watchdog is None else _watchdog.runner


def get_heartbeats() -> dict[int, Heartbeat]:
    """Returns the latest heartbeats by process, in process 0; {} in others."""
    return {} if _watchdog is None else _watchdog.detector.heartbeats


class Watchdog:
    """The watchdog of this process, which `start` creates and starts.

    Args:
      timeout_s: The maximum duration of a JAX program, and of a wait for other
        processes, in seconds.
      pipe: The pipe from the launcher, if there is one.
    """

    def __init__(self, timeout_s: float, pipe: LauncherPipe | None) -> None:
        self.process, num_processes = kv_store.get_place()
        self.runner = ProgramRunner(num_processes)
        self._pipe = pipe
        self._clock = AwakeClock()
        self.detector = FailureDetector(timeout_s=timeout_s)
        self._heartbeats = HeartbeatThread(
            self.process,
            num_processes,
            runner=self.runner,
            detector=self.detector,
            clock=self._clock,
        )
        self._cause: Cause | None = None
        self._cause_at = 0.0
        self._failure: tuple[str, int] | None = None
        self._end_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="keras_strategies watchdog", daemon=True
        )

    def start(self) -> None:
        """Starts the watchdog's thread and the heartbeat thread."""
        abort_delay.install()
        host_exchange.set_compiling(self._heartbeats.is_compiling)
        self._heartbeats.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watchdog's thread and the heartbeat thread.

        If this process later joins another job, `start` creates a new watchdog.
        """
        global _watchdog
        host_exchange.set_compiling(None)
        self._heartbeats.stop()
        self._stop.set()
        self._thread.join(1.0)
        _watchdog = None

    def explain(self) -> None:
        """Waits until it is clear whether another process caused an error here.

        If another process died or failed, the watchdog ends this process during
        the wait and reports that cause. Otherwise the function returns as soon
        as all other processes have shown that they are alive, or after the
        time within which a dead process would have been detected.
        """
        self._heartbeats.suspect()
        end = self._clock.seconds + HEARTBEAT_S
        while self._clock.seconds < end:
            if self._cause is None and self._heartbeats.all_live.is_set():
                return
            time.sleep(_POLL_S)

    def fail(self, text: str, code: int, cause: Cause) -> None:
        """Records this process's failure, and reports it to the others.

        Args:
          text: The reason, which this process prints as its last line.
          code: The exit code of this process.
          cause: The cause that is sent to the other processes.
        """
        self._end_at = self._clock.seconds + _ENDING_S
        self._failure = (text, code)
        self._heartbeats.send(cause)

    def end_soon(self) -> None:
        """Makes this process end soon, if `fail` was called earlier.

        The process ends even if its script continues to run.
        """
        if self._failure is not None:
            self._end_at = self._clock.seconds + _SOON_S

    def end_failed(self) -> None:
        """Ends this process if `fail` was called, after sending the cause."""
        if self._failure is None:
            return
        end = self._clock.seconds + _SENDING_S
        # The process that hosts the store waits until the others have read the
        # message.
        event = self._heartbeats.has_sent
        if self.process == HOST:
            event = self._heartbeats.all_received
        while not event.is_set() and self._clock.seconds < end:
            event.wait(_POLL_S)
        # The others need the service until they end, a moment after they have
        # received the message.
        if self.process == HOST:
            time.sleep(2 * _GRACE_S)
        exit_hooks.end(self.process, *self._failure)

    def wait_for_others(self) -> None:
        """Waits until the scripts of all other processes have ended, too.

        If another process fails, the watchdog ends this process during the
        wait.
        """
        self.runner.is_done = True
        self._heartbeats.hurry()
        while not self._heartbeats.is_over.wait(_POLL_S):
            if self._heartbeats.has_left:
                return
        end = self._clock.seconds + _SENDING_S
        while self.process == HOST and self._clock.seconds < end:
            if self._heartbeats.all_received.wait(_POLL_S):
                return

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._clock.tick()
            if self._heartbeats.has_left or self._heartbeats.is_over.is_set():
                continue
            if self._failure is not None:
                if self._clock.seconds > self._end_at:
                    exit_hooks.end(self.process, *self._failure)
                continue
            self._look()
            # The process that hosts the store ends last, because the others
            # still need the store.
            grace_s = _GRACE_S * (2 if self.process == HOST else 1)
            waited = self._clock.seconds - self._cause_at
            if self._cause is not None and waited > grace_s:
                exit_hooks.end(self.process, self._cause.text, self._cause.code)

    def _look(self) -> None:
        line = self._pipe.read() if self._pipe is not None else None
        if line is not None:
            # The end is not delayed here, because the launcher is about to end
            # the processes.
            self._note(Cause(text=line))
            self._cause_at = -math.inf
            self._pipe = None
        elif self._cause is None:
            cause = self._heartbeats.cause or self._find_lost()
            if cause is not None:
                self._note(cause)

    def _note(self, cause: Cause) -> None:
        if self._cause is None:
            self._cause, self._cause_at = cause, self._clock.seconds

    def _find_lost(self) -> Cause | None:
        """Finds dead processes from the behavior of JAX's coordination service.

        When the service considers a process dead, JAX aborts the others.
        `abort_delay` delays these aborts. During the delay, calls to the
        key-value store do not return, and this function finds the cause.

        Returns:
          The cause, or None if no failure is certain.
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
            return make_death_cause(silent, "JAX received no heartbeat")
        if self.process != HOST and hung_s > HEARTBEAT_S:
            return make_death_cause(
                [HOST],
                "JAX's coordination service, which it hosts, has not answered "
                f"for {HEARTBEAT_S} s",
            )
        return None
