"""The heartbeat thread, which exchanges messages with the other processes.

Through the key-value store of JAX's coordination service. Its calls may hang,
or fail, when the process that hosts the service is stopped or dead: who looks
at `silent_s` sees that.
"""

import json
import threading
import time

import jax

from keras_strategies.cluster.exchange import kv_store
from keras_strategies.cluster.exchange.exit_codes import Cause
from keras_strategies.cluster.exchange.message_forms import load_form
from keras_strategies.cluster.watchdog.failure_detector import (
    FailureDetector,
    Heartbeat,
    died,
)
from keras_strategies.cluster.watchdog.progress import Progress

HOST = 0
"""The process in which JAX's coordination service runs."""

_FOLDER = "keras_strategies/watchdog"
_SENT = f"{_FOLDER}/sent/"
_HEARTBEATS = f"{_FOLDER}/beats/"
_RECEIVED = f"{_FOLDER}/received/"
_OVER, _DETECTOR, _SILENT = "over", "judge", "silent"
_TALK_S = 0.25
_HEARTBEAT_S = 0.5
# Who waits in vain asks by itself only if process 0 does not find out.
_HOST_FIRST_S = 5.0
# With more processes each sends less often.
_MANY = 64
_FULL_S = 1.0
# When only the others' ends are waited for.
_HURRIED_S = 0.05
_MAX_DIGITS = 9
_MAX_CHARACTERS = 1 << 20


class AwakeClock:
    """Seconds in which this process ran: not those when it was stopped.

    Its own standstill must not look like the others' silence.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        """Advances the clock; a long time since the last tick counts little."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _FULL_S)
        self._last = now


class HeartbeatThread:
    """Sends what this process does, and receives what the others send.

    Process 0 receives all heartbeats and sends what the detector finds; the
    others receive that alone, unless they have a reason to look themselves. So
    reads of the store grow with the number of processes, not its square.

    Args:
      process: This process's number.
      num_processes: How many there are.
      progress: What this process does.
      detector: Finds what keeps the job from continuing.
      clock: Ticked by somebody else.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        *,
        progress: Progress,
        detector: FailureDetector,
        clock: AwakeClock,
    ) -> None:
        self.detector = detector
        self.cause: Cause | None = None
        self.silent: list[int] = []
        self.has_left = False
        self.is_over = threading.Event()
        self.has_sent = threading.Event()
        self.all_received = threading.Event()
        self.all_live = threading.Event()
        self._slower = max(1.0, num_processes / _MANY)
        self._process = process
        self._others = {str(p) for p in range(num_processes)} - {str(process)}
        self._progress = progress
        self._clock = clock
        self._client = kv_store.client()
        self._own: Cause | None = None
        self._suspects_since: float | None = None
        self._call_since: float | None = None
        self._errors_since: float | None = None
        self._heartbeat_at = -_HEARTBEAT_S
        self._number = 0
        self._has_answered = False
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="keras_strategies talker", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, before the store's client is gone."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(_FULL_S)

    def send(self, cause: Cause) -> None:
        """Tells the others that this process ends; does not wait."""
        self._own = cause
        self._wake.set()

    def hurry(self) -> None:
        """Tells at once that this process is done."""
        self._wake.set()

    def suspect(self) -> None:
        """Looks whether one of the others is gone: an error says so."""
        self.all_live.clear()
        self._suspects_since = self._clock.seconds

    def hung_s(self) -> float:
        """For how long the store has not answered, in seconds."""
        since = self._call_since
        return 0.0 if since is None else self._clock.seconds - since

    def failing_s(self) -> float:
        """For how long the store has answered with errors, in seconds."""
        since = self._errors_since
        return 0.0 if since is None else self._clock.seconds - since

    def _run(self) -> None:
        while not self._is_stopped:
            self._call_since = self._clock.seconds
            try:
                self._talk()
                self._errors_since = None
            except jax.errors.JaxRuntimeError:
                if not kv_store.is_available():
                    self.has_left = True
                    return
                if self._errors_since is None:
                    self._errors_since = self._clock.seconds
            finally:
                self._call_since = None
            is_done = self._progress.is_done
            self._wake.wait(_HURRIED_S if is_done else _TALK_S * self._slower)
            self._wake.clear()

    def _talk(self) -> None:
        client = self._client
        if self._own is not None and not self.has_sent.is_set():
            self._set(_SENT, str(self._process), self._own.to_json())
            self.has_sent.set()
        received = dict(client.key_value_dir_get(_SENT))
        for key, text in received.items():
            name = key.rpartition("/")[2]
            if name == _OVER:
                self.is_over.set()
            elif name == _SILENT:
                self.silent = _processes_of(text)
            elif name != str(self._process) and self.cause is None:
                self.cause = Cause.from_json(text)
        if not self._has_answered and (self.cause or self.is_over.is_set()):
            self._set(_RECEIVED, str(self._process), "")
            self._has_answered = True
        if self._process == HOST and (self._own or self._has_answered):
            # Who ends by itself reads nothing more.
            received = [*received, *dict(client.key_value_dir_get(_RECEIVED))]
            if self._others <= {key.rpartition("/")[2] for key in received}:
                self.all_received.set()
        is_done = self._progress.is_done
        pause_s = 0 if is_done else _HEARTBEAT_S * self._slower
        if self._clock.seconds - self._heartbeat_at >= pause_s:
            self._heartbeat_at = self._clock.seconds
            self._heartbeat()

    def _heartbeat(self) -> None:
        heartbeat = self._progress.heartbeat(self._number)
        self._number += 1
        self._set(_HEARTBEATS, str(self._process), heartbeat.to_json())
        is_late = heartbeat.waiting_s > self.detector.timeout_s + _HOST_FIRST_S
        if self._process == HOST or is_late or self._suspects_since is not None:
            received = self._client.key_value_dir_get(_HEARTBEATS)
            self._detect(_heartbeats_of(received))

    def _detect(self, heartbeats: dict[int, Heartbeat]) -> None:
        now = self._clock.seconds
        self.detector.receive(heartbeats, now)
        since = self._suspects_since
        if since is not None and self.detector.all_live(since, now):
            self.all_live.set()
        cause = self.detector.find(now)
        silent = self.detector.silent(now)
        if silent and since is not None:
            cause = died(silent, "an error of a collective says so")
        if self._process == HOST and silent != self.silent:
            self._set(_SENT, _SILENT, json.dumps(silent))
        if cause is not None and self.cause is None:
            self._set(_SENT, _DETECTOR, cause.to_json())
            self.cause = cause
        elif self._process == HOST and self.detector.is_over:
            self._set(_SENT, _OVER, "")

    def _set(self, folder: str, name: str, text: str) -> None:
        self._client.key_value_set(f"{folder}{name}", text, True)


def _heartbeats_of(received: list[tuple[str, str]]) -> dict[int, Heartbeat]:
    """The beats by process; without what is none, as if it had not come."""
    found = {}
    for key, text in received:
        name = key.rpartition("/")[2]
        heartbeat = Heartbeat.from_json(text)
        is_number = name.isascii() and name.isdigit()
        if heartbeat is not None and is_number and len(name) <= _MAX_DIGITS:
            found[int(name)] = heartbeat
    return found


def _processes_of(text: str) -> list[int]:
    """Numbers of processes, as process 0 sends them; none of anything else."""
    try:
        return load_form(text, [int], max_characters=_MAX_CHARACTERS)
    except ValueError:
        return []
