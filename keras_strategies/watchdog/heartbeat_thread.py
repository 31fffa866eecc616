"""The heartbeat thread, which exchanges messages with the other processes.

It uses the key-value store of JAX's coordination service. If the process that
hosts the service is stopped or dead, calls to the store may hang or fail. The
watchdog detects this with `hung_s` and `failing_s`.
"""

import json
import threading
import time

import jax

from keras_strategies.cluster.exchange import kv_store
from keras_strategies.cluster.exchange.exit_codes import Cause
from keras_strategies.cluster.exchange.message_forms import load_form
from keras_strategies.watchdog.failure_detector import (
    HOST,
    FailureDetector,
    Heartbeat,
    make_death_cause,
)
from keras_strategies.watchdog.progress import ProgramRunner

# Parts of the keys in the key-value store. They must be the same in all
# processes.
_DIRECTORY = "keras_strategies/watchdog"
_SENT = f"{_DIRECTORY}/sent/"
_HEARTBEATS = f"{_DIRECTORY}/beats/"
_RECEIVED = f"{_DIRECTORY}/received/"
_OVER, _DETECTOR, _SILENT = "over", "judge", "silent"
_PERIOD_S = 0.25
_HEARTBEAT_S = 0.5
# Process 0 detects failures first. Another process whose wait has exceeded the
# timeout also runs the detector, but only after this additional time.
_HOST_FIRST_S = 5.0
# With more processes than this, each process sends heartbeats less often.
_MANY = 64
_FULL_S = 1.0
# The period after the script's end, when this process only waits for the others
# to end.
_HURRIED_S = 0.05
_MAX_DIGITS = 9
_MAX_CHARACTERS = 1 << 20


class AwakeClock:
    """A clock that counts only the time during which this process was running.

    If this process was stopped for a while (SIGSTOP), the other processes must
    not seem to have been silent in that time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        """Advances the clock by the time since the last tick, at most 1 s."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _FULL_S)
        self._last = now


class HeartbeatThread:
    """A thread that sends this process's heartbeats and receives messages.

    Process 0 reads the heartbeats of all processes and sends what the failure
    detector finds. The other processes read only these results, unless they
    have a reason to suspect a failure. So the number of reads grows linearly
    with the number of processes.

    Args:
      process: This process's number.
      num_processes: The number of processes.
      runner: The `ProgramRunner` of this process.
      detector: The failure detector.
      clock: The clock, which another thread advances.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        *,
        runner: ProgramRunner,
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
        self._runner = runner
        self._clock = clock
        self._client = kv_store.get_client()
        self._failure: Cause | None = None
        self._suspects_since: float | None = None
        self._call_since: float | None = None
        self._errors_since: float | None = None
        self._heartbeat_at = -_HEARTBEAT_S
        self._number = 0
        self._has_answered = False
        self._wake = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="keras_strategies heartbeat", daemon=True
        )

    def start(self) -> None:
        """Starts sending heartbeats and receiving messages."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Must be called before the store's client is gone."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join(_FULL_S)

    def send(self, cause: Cause) -> None:
        """Sends the cause of this process's end to the others, asynchronously.

        `has_sent` is set when the cause has been sent.
        """
        self._failure = cause
        self._wake.set()

    def hurry(self) -> None:
        """Sends a heartbeat immediately, because the script has ended."""
        self._wake.set()

    def suspect(self) -> None:
        """Starts checking, after an error, whether all processes are alive.

        `all_live` is set when all other processes have sent a new heartbeat.
        """
        self.all_live.clear()
        self._suspects_since = self._clock.seconds

    def is_compiling(self) -> bool:
        """Returns whether any process traces, compiles or starts a program.

        It reads the latest heartbeats from the key-value store, in any thread.
        """
        received = self._client.key_value_dir_get(_HEARTBEATS)
        heartbeats = _parse_heartbeats(received).values()
        return any(heartbeat.starting_s for heartbeat in heartbeats)

    def hung_s(self) -> float:
        """Returns how long the current call to the key-value store has lasted.

        The time is in seconds; 0 outside of a call.
        """
        since = self._call_since
        return 0.0 if since is None else self._clock.seconds - since

    def failing_s(self) -> float:
        """Returns for how many seconds no call to the store has succeeded."""
        since = self._errors_since
        return 0.0 if since is None else self._clock.seconds - since

    def _run(self) -> None:
        while not self._is_stopped:
            self._call_since = self._clock.seconds
            try:
                self._exchange()
                self._errors_since = None
            except jax.errors.JaxRuntimeError:
                if not kv_store.is_available():
                    self.has_left = True
                    return
                if self._errors_since is None:
                    self._errors_since = self._clock.seconds
            finally:
                self._call_since = None
            is_done = self._runner.is_done
            self._wake.wait(_HURRIED_S if is_done else _PERIOD_S * self._slower)
            self._wake.clear()

    def _exchange(self) -> None:
        client = self._client
        if self._failure is not None and not self.has_sent.is_set():
            self._write(_SENT, str(self._process), self._failure.to_json())
            self.has_sent.set()
        received = dict(client.key_value_dir_get(_SENT))
        for key, text in received.items():
            name = key.rpartition("/")[2]
            if name == _OVER:
                self.is_over.set()
            elif name == _SILENT:
                self.silent = _parse_processes(text)
            elif name != str(self._process) and self.cause is None:
                self.cause = Cause.from_json(text)
        if not self._has_answered and (self.cause or self.is_over.is_set()):
            self._write(_RECEIVED, str(self._process), "")
            self._has_answered = True
        if self._process == HOST and (self._failure or self._has_answered):
            # A process that has itself failed (its number is a key in `_SENT`)
            # never acknowledges a message, so it counts as having received it.
            received = [*received, *dict(client.key_value_dir_get(_RECEIVED))]
            if self._others <= {key.rpartition("/")[2] for key in received}:
                self.all_received.set()
        is_done = self._runner.is_done
        pause_s = 0 if is_done else _HEARTBEAT_S * self._slower
        if self._clock.seconds - self._heartbeat_at >= pause_s:
            self._heartbeat_at = self._clock.seconds
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        heartbeat = self._runner.heartbeat(self._number)
        self._number += 1
        self._write(_HEARTBEATS, str(self._process), heartbeat.to_json())
        is_late = heartbeat.waiting_s > self.detector.timeout_s + _HOST_FIRST_S
        if self._process == HOST or is_late or self._suspects_since is not None:
            received = self._client.key_value_dir_get(_HEARTBEATS)
            self._detect(_parse_heartbeats(received))

    def _detect(self, heartbeats: dict[int, Heartbeat]) -> None:
        now = self._clock.seconds
        self.detector.receive(heartbeats, now)
        since = self._suspects_since
        if since is not None and self.detector.all_live(since, now):
            self.all_live.set()
        cause = self.detector.find(now)
        silent = self.detector.find_silent(now)
        if silent and since is not None:
            cause = make_death_cause(silent, "a collective failed")
        if self._process == HOST and silent != self.silent:
            self._write(_SENT, _SILENT, json.dumps(silent))
        if cause is not None and self.cause is None:
            self._write(_SENT, _DETECTOR, cause.to_json())
            self.cause = cause
        elif self._process == HOST and self.detector.is_over:
            self._write(_SENT, _OVER, "")

    def _write(self, directory: str, name: str, text: str) -> None:
        self._client.key_value_set(f"{directory}{name}", text, True)


def _parse_heartbeats(received: list[tuple[str, str]]) -> dict[int, Heartbeat]:
    """Returns the heartbeats by process number, without malformed ones."""
    heartbeats = {}
    for key, text in received:
        name = key.rpartition("/")[2]
        heartbeat = Heartbeat.from_json(text)
        is_number = name.isascii() and name.isdigit()
        if heartbeat is not None and is_number and len(name) <= _MAX_DIGITS:
            heartbeats[int(name)] = heartbeat
    return heartbeats


def _parse_processes(text: str) -> list[int]:
    """Parses a list of process numbers; returns [] if it is malformed."""
    try:
        return load_form(text, [int], max_characters=_MAX_CHARACTERS)
    except ValueError:
        return []
