"""The failure detector: heartbeats of the processes, and its verdicts.

Pure: the caller passes heartbeats and the time, so tests need no clock.

References:
  - Chandra and Toueg, Unreliable Failure Detectors for Reliable Distributed
    Systems (JACM 1996).
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

from keras_strategies.cluster.addresses import name_processes
from keras_strategies.cluster.exchange.exit_codes import Cause, ExitCode
from keras_strategies.cluster.exchange.message_forms import load_form

# A process that is done takes part in nothing more; those that wait for it are
# given a moment, in case it has failed and sends the cause.
_DONE_S = 1.0
_AGREEING_S = 1.0
# The most that a beat may be on its way after its process's death.
_ON_ITS_WAY_S = 0.1
_SILENT_S = 4.0
_SHOWN = 8
_MAX_CHARACTERS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a process does at one moment.

    Attributes:
      number: How many heartbeats it has sent before this one.
      programs: How many programs over all processes it has started.
      waiting_s: For how long the oldest of them has been running; 0 if all
        have ended.
      starting_s: For how long it has been tracing, compiling or starting
        one; 0 if it does not.
      agreeing: What it waits for others in, on the host; "" for nothing.
      agreeing_s: For how long.
      where: Where its main thread is.
      is_done: Whether its script has ended.
    """

    number: int = 0
    programs: int = 0
    waiting_s: float = 0.0
    starting_s: float = 0.0
    agreeing: str = ""
    agreeing_s: float = 0.0
    where: str = ""
    is_done: bool = False

    def to_json(self) -> str:
        """The heartbeat as it is sent."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Heartbeat | None":
        """What `to_json` of another process gave; None of anything else."""
        form = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        try:
            sent = load_form(
                text, form, max_characters=_MAX_CHARACTERS, has_nan=True
            )
        except ValueError:
            return None
        return cls(**sent) if len(sent) == len(form) else None


@dataclasses.dataclass
class _Received:
    heartbeat: Heartbeat
    at: float
    # When it was first seen as it is: in user code, or done.
    same_since: float


def died(processes: Sequence[int], why: str) -> Cause:
    """The cause that is the end of some processes."""
    return Cause(text=f"{name_processes(processes)} died or stopped: {why}")


class FailureDetector:
    """Finds from all processes' heartbeats what keeps a job from continuing.

    Args:
      timeout_s: How long a program may run, or be waited for, in seconds.
      host: The process without heartbeats here: it hosts the store.
    """

    def __init__(self, *, timeout_s: float, host: int = 0) -> None:
        self.timeout_s = timeout_s
        self._host = host
        self._received: dict[int, _Received] = {}
        # What was the last word when `all_live` was first asked: (since, by
        # process its beat's number).
        self._last_words: tuple[float, dict[int, int]] | None = None
        # When one of them last traced or compiled.
        self._compiled_at = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether all processes with a heartbeat are done."""
        return all(
            received.heartbeat.is_done for received in self._received.values()
        )

    def receive(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Takes in the processes' heartbeats, at a time in seconds."""
        for process, heartbeat in heartbeats.items():
            known = self._received.get(process)
            if known is None:
                self._received[process] = _Received(heartbeat, now, now)
            elif known.heartbeat.number != heartbeat.number:
                is_same = (
                    known.heartbeat.programs,
                    known.heartbeat.is_done,
                ) == (
                    heartbeat.programs,
                    heartbeat.is_done,
                )
                since = known.same_since if is_same else now
                self._received[process] = _Received(heartbeat, now, since)

    def all_live(self, since: float, now: float) -> bool:
        """Whether all others have sent a heartbeat after a time.

        What is received after it may have been sent before: so the first time
        that it is asked only notes what was sent last.
        """
        numbers = {
            process: received.heartbeat.number
            for process, received in self._received.items()
            if process != self._host
        }
        if self._last_words is None or self._last_words[0] != since:
            if now > since + _ON_ITS_WAY_S:
                self._last_words = since, numbers
            return False
        before = self._last_words[1]
        return all(n > before.get(p, -1) for p, n in numbers.items())

    def silent(self, now: float) -> list[int]:
        """The processes without new heartbeats for some time.

        Such a process may be dead, stopped, or in a call that lets no other
        thread of Python run: it takes more to tell which.
        """
        return [
            process
            for process, received in sorted(self._received.items())
            if now - received.at > _SILENT_S and process != self._host
        ]

    def find(self, now: float) -> Cause | None:
        """What keeps the job from continuing; None for nothing."""
        return self._find_left() or self._find_stalled(now)

    def _find_left(self) -> Cause | None:
        """One is done that others wait for."""
        done = [
            p for p, h in sorted(self._received.items()) if h.heartbeat.is_done
        ]
        for process, received in sorted(self._received.items()):
            heartbeat = received.heartbeat
            for gone in done:
                programs = self._received[gone].heartbeat.programs
                if (
                    heartbeat.programs > programs
                    and heartbeat.waiting_s > _DONE_S
                ):
                    waits_in = f"program {heartbeat.programs}"
                elif heartbeat.agreeing_s > _DONE_S:
                    waits_in = heartbeat.agreeing
                else:
                    continue
                return Cause(
                    text=f"process {gone} has ended its script after "
                    f"{programs} programs, and process {process} waits for "
                    f"it in {waits_in} (at {heartbeat.where}); all processes "
                    "must make the same calls and take as many steps"
                )
        return None

    def _find_stalled(self, now: float) -> Cause | None:
        heartbeats = {
            p: received.heartbeat
            for p, received in sorted(self._received.items())
        }
        waits = max((b.waiting_s for b in heartbeats.values()), default=0.0)
        # A first program may compile for as long as it takes.
        if any(b.starting_s for b in heartbeats.values()):
            self._compiled_at = now
        # Those that wait for it have waited for nobody else till then.
        if now - self._compiled_at <= self.timeout_s:
            return None
        if waits <= self.timeout_s:
            return self._find_silent(heartbeats, now)
        most = max(heartbeat.programs for heartbeat in heartbeats.values())
        behind = [
            p
            for p, heartbeat in heartbeats.items()
            if heartbeat.programs < most
        ]
        if not behind:
            text = (
                f"all processes wait for program {most} for {waits:.0f} s; it "
                "takes so long, or they have started different programs"
            )
        else:
            lines = [self._described(p, now) for p in behind[:_SHOWN]]
            ahead = next(p for p in heartbeats if p not in behind)
            text = (
                f"{'; '.join(lines)}; process {ahead} has started {most} and "
                f"waits for {waits:.0f} s"
            )
        return Cause(text=text, code=ExitCode.STALLED)

    def _find_silent(
        self, heartbeats: dict[int, Heartbeat], now: float
    ) -> Cause | None:
        """Some wait on the host, for too long, for others that do not."""
        waits = [
            p for p, heartbeat in heartbeats.items() if heartbeat.agreeing_s
        ]
        longest = max(
            waits, key=lambda p: heartbeats[p].agreeing_s, default=None
        )
        if longest is None:
            return None
        heartbeat = heartbeats[longest]
        # Agreements have a limit of their own, and say what they miss.
        if heartbeat.agreeing_s <= self.timeout_s + _AGREEING_S:
            return None
        others = [p for p in heartbeats if p not in waits][:_SHOWN]
        lines = [self._described(p, now) for p in others]
        lines.append(
            f"process {longest} waits for others in {heartbeat.agreeing} for "
            f"{heartbeat.agreeing_s:.0f} s (at {heartbeat.where})"
        )
        return Cause(text="; ".join(lines), code=ExitCode.STALLED)

    def _described(self, process: int, now: float) -> str:
        received = self._received[process]
        heartbeat = received.heartbeat
        seconds = now - received.same_since
        return (
            f"process {process} has started {heartbeat.programs} programs, "
            f"none for {seconds:.0f} s; its main thread is at {heartbeat.where}"
        )
