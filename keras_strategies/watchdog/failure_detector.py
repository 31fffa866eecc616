"""The failure detector, which finds failed processes from their heartbeats.

It does no I/O and reads no clock: the caller passes the heartbeats and the
time, which makes it easy to test.

References:
  - Chandra and Toueg, Unreliable Failure Detectors for Reliable Distributed
    Systems (JACM 1996).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence

from keras_strategies.cluster.addresses import name_processes
from keras_strategies.cluster.exchange.exit_codes import Cause, ExitCode
from keras_strategies.cluster.exchange.host_exchange import (
    CREATING,
    SAME_VARIABLES,
    SAME_VARIABLES_FIX,
)
from keras_strategies.cluster.exchange.message_forms import load_form

HOST = 0
"""The process in which JAX's coordination service runs.

It hosts the key-value store, and is never reported as silent, because without
the store no heartbeats arrive."""

COMPARING = (
    "the comparison of a value by JAX (as in `assign`, or for an optimizer "
    "that is built outside of a scope)"
)
"""The name of a wait in which JAX compares a value between all processes."""

_SAME_VALUES = (
    "All processes must create variables and assign values in the same order."
)
# A process whose script has ended runs no further programs. If another process
# still waits for it, this is reported only after this time, because the ended
# process may have failed and be about to send the cause.
_DONE_S = 1.0
_AGREEING_S = 1.0
# Processes that are in different calls for this time wait for each other.
_CREATION_S = 5.0
# How long after a process's death its last heartbeat may still arrive.
_ON_ITS_WAY_S = 0.1
_SILENT_S = 4.0
_SHOWN = 8
_MAX_CHARACTERS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A message in which a process reports what it is doing.

    Attributes:
      number: The number of heartbeats that the process sent before this one.
      programs: The number of compiled JAX programs that this process has
        started, counting only those that run over all processes.
      waiting_s: The time since the start of the oldest program that is still
        running, in seconds; 0 if all programs have ended.
      starting_s: How long the process has been tracing, compiling or starting
        a program, in seconds; 0 if it is not doing so.
      agreeing: The name of the `Agreement` in which the process waits for
        others; "" if it does not wait.
      agreeing_s: The duration of that wait, in seconds.
      agrees_in_main: Whether the process's main thread waits in the
        `Agreement`.
      where: The position of the process's main thread in the code.
      is_done: Whether the process's script has ended.
      steps: The number of steps that `RunReport` has measured in this process;
        0 if it measures none.
      steps_s: The time of these steps, in seconds.
      local_s: The part of it that this process spent outside of programs that
        run over all processes, and not waiting for other processes.
      input_s: The part of `local_s` that it waited for its own data.
    """

    number: int = 0
    programs: int = 0
    waiting_s: float = 0.0
    starting_s: float = 0.0
    agreeing: str = ""
    agreeing_s: float = 0.0
    agrees_in_main: bool = False
    where: str = ""
    is_done: bool = False
    steps: int = 0
    steps_s: float = 0.0
    local_s: float = 0.0
    input_s: float = 0.0

    def to_json(self) -> str:
        """Encodes the heartbeat as JSON, to send it to other processes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Heartbeat | None":
        """Parses another process's heartbeat; None if it is malformed."""
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
    # The time since which `programs` and `is_done` have not changed.
    same_since: float


def make_death_cause(processes: Sequence[int], why: str) -> Cause:
    """Returns a `Cause` which states that processes died or stopped.

    Args:
      processes: The numbers of the processes.
      why: How this was detected.
    """
    return Cause(text=f"{name_processes(processes)} died or stopped: {why}")


class FailureDetector:
    """A detector that finds failed or stuck processes from their heartbeats.

    Args:
      timeout_s: The maximum duration of a JAX program, and of a wait for other
        processes, in seconds.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._received: dict[int, _Received] = {}
        # Recorded by the first call of `all_live`: its argument `since`, and
        # the number of each process's last heartbeat.
        self._baseline: tuple[float, dict[int, int]] | None = None
        # The last time when any process was tracing or compiling.
        self._compiled_at = -math.inf

    @property
    def heartbeats(self) -> dict[int, Heartbeat]:
        """The latest heartbeat of each process, in the processes' order."""
        return {p: self._received[p].heartbeat for p in sorted(self._received)}

    @property
    def is_over(self) -> bool:
        """Whether the scripts of all known processes have ended.

        A process is known when its first heartbeat has arrived.
        """
        return all(h.is_done for h in self.heartbeats.values())

    def receive(self, heartbeats: Mapping[int, Heartbeat], now: float) -> None:
        """Records the latest heartbeat of each process.

        Args:
          heartbeats: The heartbeats by process number.
          now: The time when the heartbeats were read, in seconds.
        """
        for process, heartbeat in heartbeats.items():
            known = self._received.get(process)
            if known is None:
                self._received[process] = _Received(heartbeat, now, now)
            elif known.heartbeat.number != heartbeat.number:
                before, since = known.heartbeat, known.same_since
                if before.programs != heartbeat.programs or (
                    before.is_done != heartbeat.is_done
                ):
                    since = now
                self._received[process] = _Received(heartbeat, now, since)

    def all_live(self, since: float, now: float) -> bool:
        """Returns whether all processes sent a heartbeat after time `since`.

        The process that hosts the store is not checked. A heartbeat that
        arrives after the time `since` may have been sent before it. So the
        first call only records the latest heartbeats and returns False. Later
        calls return True if newer heartbeats have arrived.

        Args:
          since: The time, in seconds.
          now: The current time, in seconds.
        """
        heartbeats = self.heartbeats.items()
        numbers = {p: h.number for p, h in heartbeats if p != HOST}
        if self._baseline is None or self._baseline[0] != since:
            if now > since + _ON_ITS_WAY_S:
                self._baseline = since, numbers
            return False
        before = self._baseline[1]
        return all(n > before.get(p, -1) for p, n in numbers.items())

    def find_silent(self, now: float) -> list[int]:
        """Returns the processes that have sent no heartbeat for some time.

        Such a process may be dead, stopped, or in a call that holds the GIL.
        Heartbeats alone cannot distinguish these cases.
        """
        return [
            process
            for process, received in sorted(self._received.items())
            if now - received.at > _SILENT_S and process != HOST
        ]

    def find(self, now: float) -> Cause | None:
        """Returns the cause that prevents the job from continuing, or None."""
        return (
            self._find_done()
            or self._find_creation(now)
            or self._find_stalled(now)
        )

    def _find_done(self) -> Cause | None:
        """Returns a cause if a process waits for one whose script has ended."""
        heartbeats = self.heartbeats
        done = [p for p, h in heartbeats.items() if h.is_done]
        for (process, one), gone in itertools.product(heartbeats.items(), done):
            programs = heartbeats[gone].programs
            if one.programs > programs and one.waiting_s > _DONE_S:
                waits_in = f"program {one.programs}"
            elif one.agreeing_s > _DONE_S:
                waits_in = one.agreeing
            else:
                continue
            return Cause(
                text=f"the script of process {gone} has ended after {programs} "
                f"programs, but process {process} waits for it in {waits_in} "
                f"(at {one.where}); all processes must make the same calls and "
                "run the same steps"
            )
        return None

    def _find_creation(self, now: float) -> Cause | None:
        """Returns a cause if one process creates variables, another does not.

        The first waits until the other one creates them (or until JAX has
        compared a value). The other one waits until the first starts the same
        program, or takes part in an `Agreement`.
        """
        heartbeats = self.heartbeats
        is_starting = any(h.starting_s for h in heartbeats.values())
        if is_starting or self.find_silent(now):
            return None
        for (process, one), (other, ahead) in itertools.permutations(
            heartbeats.items(), 2
        ):
            is_comparing = one.agreeing == COMPARING
            is_creating = one.agreeing.startswith(CREATING)
            is_ahead = ahead.programs > one.programs and not ahead.agreeing
            if (is_comparing or is_creating) and is_ahead and not one.waiting_s:
                waits_in, seconds = f"program {ahead.programs}", ahead.waiting_s
            elif is_comparing and ahead.agrees_in_main:
                waits_in, seconds = ahead.agreeing, ahead.agreeing_s
            else:
                continue
            if min(one.agreeing_s, seconds) > _CREATION_S:
                rule, place = SAME_VARIABLES, ""
                if is_comparing:
                    rule, place = _SAME_VALUES, f" (at {one.where})"
                text = (
                    f"{rule} Received: {one.agreeing} in process {process}"
                    f"{place}, for which process {other} waits in {waits_in} "
                    f"(at {ahead.where}). "
                    f"{SAME_VARIABLES_FIX.removesuffix('.')}"
                )
                return Cause(text=text, code=ExitCode.STALLED)
        return None

    def _find_stalled(self, now: float) -> Cause | None:
        heartbeats = self.heartbeats
        waits = max((b.waiting_s for b in heartbeats.values()), default=0.0)
        # Compilation has no time limit, and other processes wait while one
        # compiles. So the timeout begins when no process compiles any more.
        if any(b.starting_s for b in heartbeats.values()):
            self._compiled_at = now
        if now - self._compiled_at <= self.timeout_s:
            return None
        if waits <= self.timeout_s:
            return self._find_absent(heartbeats, now)
        maximum = max(heartbeat.programs for heartbeat in heartbeats.values())
        behind = [p for p, h in heartbeats.items() if h.programs < maximum]
        if not behind:
            text = (
                f"all processes have waited for program {maximum} for "
                f"{waits:.0f} s; it is too slow, or the processes have started "
                "different programs"
            )
        else:
            lines = [self._describe(p, now) for p in behind[:_SHOWN]]
            ahead = next(p for p in heartbeats if p not in behind)
            text = (
                f"{'; '.join(lines)}; process {ahead} has started {maximum} "
                f"programs and has waited for {waits:.0f} s"
            )
        return Cause(text=text, code=ExitCode.STALLED)

    def _find_absent(
        self, heartbeats: dict[int, Heartbeat], now: float
    ) -> Cause | None:
        """Returns a cause if a process waits in an `Agreement` for too long."""
        waits = {p: h.agreeing_s for p, h in heartbeats.items() if h.agreeing_s}
        if not waits:
            return None
        longest = max(waits, key=waits.__getitem__)
        heartbeat = heartbeats[longest]
        # `Agreement` also has a timeout, whose error is more precise. The extra
        # time allows it to raise that error first.
        if heartbeat.agreeing_s <= self.timeout_s + _AGREEING_S:
            return None
        others = [p for p in heartbeats if p not in waits][:_SHOWN]
        lines = [self._describe(p, now) for p in others]
        lines.append(
            f"process {longest} has waited for other processes in "
            f"{heartbeat.agreeing} for {heartbeat.agreeing_s:.0f} s (at "
            f"{heartbeat.where})"
        )
        return Cause(text="; ".join(lines), code=ExitCode.STALLED)

    def _describe(self, process: int, now: float) -> str:
        received = self._received[process]
        heartbeat = received.heartbeat
        seconds = now - received.same_since
        return (
            f"process {process} has started {heartbeat.programs} programs, "
            f"none in the last {seconds:.0f} s; its main thread is at "
            f"{heartbeat.where}"
        )
