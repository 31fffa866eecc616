"""The failure detector, which finds failed processes from heartbeats.

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

# A process that is done takes part in nothing more. Those that wait for it do
# so a moment longer, in case it has failed and sends the cause.
_DONE_S = 1.0
_AGREEING_S = 1.0
# How long a heartbeat may be in transit after its process's death.
_ON_ITS_WAY_S = 0.1
_SILENT_S = 4.0
_SHOWN = 8
_MAX_CHARACTERS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A snapshot of a process's activity.

    Attributes:
      number: The number of heartbeats sent before this one.
      programs: The number of programs over all processes that it has started.
      waiting_s: The time since the start of the oldest program in flight, in
        seconds; 0 if all have ended.
      starting_s: The time it has been tracing, compiling or starting a
        program, in seconds; 0 if it is not.
      agreeing: The name of the host agreement in which it waits for others;
        "" if it does not.
      agreeing_s: The time of that wait, in seconds.
      where: The position of its main thread in the code.
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
        """Returns the heartbeat as it is sent."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Heartbeat | None":
        """Parses another process's heartbeat; None for anything else."""
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
    # Since when `programs` and `is_done` have not changed.
    same_since: float


def make_death_cause(processes: Sequence[int], why: str) -> Cause:
    """Returns the cause for processes that died or stopped."""
    return Cause(text=f"{name_processes(processes)} died or stopped: {why}")


class FailureDetector:
    """Decides from all heartbeats which processes keep a job from continuing.

    Args:
      timeout_s: The maximum time for a program, or for a wait for others, in
        seconds.
      host: The process that hosts the store. It is never reported as silent:
        without it no heartbeats arrive.
    """

    def __init__(self, *, timeout_s: float, host: int = 0) -> None:
        self.timeout_s = timeout_s
        self._host = host
        self._received: dict[int, _Received] = {}
        # From the first call of `all_live`: its `since`, and the number of
        # each process's last heartbeat.
        self._baseline: tuple[float, dict[int, int]] | None = None
        # The time when a process last traced or compiled.
        self._compiled_at = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether all processes with a heartbeat are done."""
        return all(
            received.heartbeat.is_done for received in self._received.values()
        )

    def receive(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Records the processes' heartbeats, received at a time in seconds."""
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
        """Returns whether all others have sent a heartbeat after a time.

        A heartbeat received after this time may have been sent before it, so
        the first call only records the last heartbeats and returns False.
        """
        numbers = {
            process: received.heartbeat.number
            for process, received in self._received.items()
            if process != self._host
        }
        if self._baseline is None or self._baseline[0] != since:
            if now > since + _ON_ITS_WAY_S:
                self._baseline = since, numbers
            return False
        before = self._baseline[1]
        return all(n > before.get(p, -1) for p, n in numbers.items())

    def find_silent(self, now: float) -> list[int]:
        """Returns the processes without new heartbeats for some time.

        Such a process may be dead, stopped, or in a call that holds the GIL;
        heartbeats alone cannot distinguish these.
        """
        return [
            process
            for process, received in sorted(self._received.items())
            if now - received.at > _SILENT_S and process != self._host
        ]

    def find(self, now: float) -> Cause | None:
        """Returns what keeps the job from continuing, or None."""
        return self._find_done() or self._find_stalled(now)

    def _find_done(self) -> Cause | None:
        """Returns the cause if a process is done and others wait for it."""
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
                    "must make the same calls and take the same steps"
                )
        return None

    def _find_stalled(self, now: float) -> Cause | None:
        heartbeats = {
            p: received.heartbeat
            for p, received in sorted(self._received.items())
        }
        waits = max((b.waiting_s for b in heartbeats.values()), default=0.0)
        # Compilation has no time limit, and the others wait for it: their
        # timeout begins when all have compiled.
        if any(b.starting_s for b in heartbeats.values()):
            self._compiled_at = now
        if now - self._compiled_at <= self.timeout_s:
            return None
        if waits <= self.timeout_s:
            return self._find_absent(heartbeats, now)
        most = max(heartbeat.programs for heartbeat in heartbeats.values())
        behind = [
            p
            for p, heartbeat in heartbeats.items()
            if heartbeat.programs < most
        ]
        if not behind:
            text = (
                f"all processes wait for program {most} for {waits:.0f} s; it "
                "is too slow, or they have started different programs"
            )
        else:
            lines = [self._describe(p, now) for p in behind[:_SHOWN]]
            ahead = next(p for p in heartbeats if p not in behind)
            text = (
                f"{'; '.join(lines)}; process {ahead} has started {most} and "
                f"waits for {waits:.0f} s"
            )
        return Cause(text=text, code=ExitCode.STALLED)

    def _find_absent(
        self, heartbeats: dict[int, Heartbeat], now: float
    ) -> Cause | None:
        """Returns the cause if some miss an agreement for too long."""
        waits = [
            p for p, heartbeat in heartbeats.items() if heartbeat.agreeing_s
        ]
        longest = max(
            waits, key=lambda p: heartbeats[p].agreeing_s, default=None
        )
        if longest is None:
            return None
        heartbeat = heartbeats[longest]
        # Agreements have a timeout, too, whose error is more precise.
        if heartbeat.agreeing_s <= self.timeout_s + _AGREEING_S:
            return None
        others = [p for p in heartbeats if p not in waits][:_SHOWN]
        lines = [self._describe(p, now) for p in others]
        lines.append(
            f"process {longest} waits for others in {heartbeat.agreeing} for "
            f"{heartbeat.agreeing_s:.0f} s (at {heartbeat.where})"
        )
        return Cause(text="; ".join(lines), code=ExitCode.STALLED)

    def _describe(self, process: int, now: float) -> str:
        received = self._received[process]
        heartbeat = received.heartbeat
        seconds = now - received.same_since
        return (
            f"process {process} has started {heartbeat.programs} programs, "
            f"none for {seconds:.0f} s; its main thread is at {heartbeat.where}"
        )
