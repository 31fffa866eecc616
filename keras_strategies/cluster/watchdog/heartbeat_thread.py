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
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.cluster.watchdog.failure_detector import Beat, Judge, died
from keras_strategies.cluster.watchdog.progress import Progress

HOST = 0
"""The process in which JAX's coordination service runs."""

_FOLDER = "keras_strategies/guard"
_TOLD = f"{_FOLDER}/told/"
_BEATS = f"{_FOLDER}/beats/"
_HEARD = f"{_FOLDER}/heard/"
_OVER, _JUDGE, _SILENT = "over", "judge", "silent"
_TALK_S = 0.25
_BEAT_S = 0.5
# Who waits in vain asks by itself only if process 0 does not find out.
_HOST_FIRST_S = 5.0
# Of more processes each talks less often.
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
        """Lets time go on; a long time since the last tick counts little."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _FULL_S)
        self._last = now


class Talker:
    """Tells what this process does, and hears what the others tell.

    Process 0 hears the beats of all, judges them and tells what follows; the
    others hear that alone, unless they have a reason to look themselves. So
    reads of the store grow with the number of processes, not its square.

    Args:
      process: This process's number.
      num_processes: How many there are.
      progress: What this process does.
      judge: Finds what keeps the job from going on.
      clock: Ticked by somebody else.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        *,
        progress: Progress,
        judge: Judge,
        clock: AwakeClock,
    ) -> None:
        self.judge = judge
        self.cause: Cause | None = None
        self.silent: list[int] = []
        self.has_left = False
        self.is_over = threading.Event()
        self.has_told = threading.Event()
        self.all_heard = threading.Event()
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
        self._beat_at = -_BEAT_S
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

    def tell(self, cause: Cause) -> None:
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
        if self._own is not None and not self.has_told.is_set():
            self._set(_TOLD, str(self._process), self._own.to_json())
            self.has_told.set()
        told = dict(client.key_value_dir_get(_TOLD))
        for key, text in told.items():
            name = key.rpartition("/")[2]
            if name == _OVER:
                self.is_over.set()
            elif name == _SILENT:
                self.silent = _processes_of(text)
            elif name != str(self._process) and self.cause is None:
                self.cause = Cause.from_json(text)
        if not self._has_answered and (self.cause or self.is_over.is_set()):
            self._set(_HEARD, str(self._process), "")
            self._has_answered = True
        if self._process == HOST and (self._own or self._has_answered):
            # Who ends by itself reads nothing more.
            heard = [*told, *dict(client.key_value_dir_get(_HEARD))]
            if self._others <= {key.rpartition("/")[2] for key in heard}:
                self.all_heard.set()
        is_done = self._progress.is_done
        pause_s = 0 if is_done else _BEAT_S * self._slower
        if self._clock.seconds - self._beat_at >= pause_s:
            self._beat_at = self._clock.seconds
            self._beat()

    def _beat(self) -> None:
        beat = self._progress.beat(self._number)
        self._number += 1
        self._set(_BEATS, str(self._process), beat.to_json())
        is_late = beat.waiting_s > self.judge.timeout_s + _HOST_FIRST_S
        if self._process == HOST or is_late or self._suspects_since is not None:
            told = self._client.key_value_dir_get(_BEATS)
            self._judge(_beats_of(told))

    def _judge(self, beats: dict[int, Beat]) -> None:
        now = self._clock.seconds
        self.judge.hear(beats, now)
        since = self._suspects_since
        if since is not None and self.judge.all_live(since, now):
            self.all_live.set()
        cause = self.judge.find(now)
        silent = self.judge.silent(now)
        if silent and since is not None:
            cause = died(silent, "an error of a collective says so")
        if self._process == HOST and silent != self.silent:
            self._set(_TOLD, _SILENT, json.dumps(silent))
        if cause is not None and self.cause is None:
            self._set(_TOLD, _JUDGE, cause.to_json())
            self.cause = cause
        elif self._process == HOST and self.judge.is_over:
            self._set(_TOLD, _OVER, "")

    def _set(self, folder: str, name: str, text: str) -> None:
        self._client.key_value_set(f"{folder}{name}", text, True)


def _beats_of(told: list[tuple[str, str]]) -> dict[int, Beat]:
    """The beats by process; without what is none, as if it had not come."""
    found = {}
    for key, text in told:
        name = key.rpartition("/")[2]
        beat = Beat.from_json(text)
        is_number = name.isascii() and name.isdigit()
        if beat is not None and is_number and len(name) <= _MAX_DIGITS:
            found[int(name)] = beat
    return found


def _processes_of(text: str) -> list[int]:
    """Numbers of processes, as process 0 tells them; none of anything else."""
    try:
        said = load_json(text, max_characters=_MAX_CHARACTERS)
    except ValueError:
        return []
    is_list = isinstance(said, list) and all(type(p) is int for p in said)
    return said if is_list else []
