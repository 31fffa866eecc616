"""Supervises a job's local processes until all have ended.

When a process ends, rules decide what happens to the other processes. The rules
are methods of `_Job`. They set a plan, which is a list of actions and the times
at which to perform them.
"""

import collections
import contextlib
import dataclasses
import errno
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from keras_strategies.cli.launch.local_process import Child, Output
from keras_strategies.cluster.exchange.exit_codes import ExitCode

# Exit codes which show that a process ended by itself, even if the launcher had
# also sent it a signal.
_SELF_MADE = (ExitCode.FAILED, ExitCode.STALLED, ExitCode.PEER_FAILED)
_CLOSED_OUTPUT = 141
_FAILED_OUTPUT = 74  # EX_IOERR of `sysexits.h`.
_POLL_S = 0.02
_SHOW_S = 2.0
# Seconds from a failure until the other processes are sent SIGTERM and SIGKILL.
# Usually they detect the failure, print an error and exit before this time.
_FAILED = (0.6, 0.9)
# Seconds until the launcher reports a failure to the other processes, if the
# failed process exited by itself. Such a process has already sent them its
# error, which has more details than the launcher's report.
_REPORTS_ITSELF_S = 0.4
# Additional seconds if a process ended because a peer failed. That peer may
# still be running, because it waits a second for others to receive its error.
_PEER_FAILED = 1.0
# Kubernetes and SLURM send SIGKILL 30 seconds after SIGTERM.
_PREEMPTED = 25.0
_INTERRUPTED = (5.0, 8.0)
_SEND_LINE = "send line"
# How a job ended, by the exit code of its first cause. Every failed process
# reports that a peer failed. The peer may have exited too early, with exit code
# 0.
_ENDS: dict[int, str] = {
    ExitCode.PREEMPTED: "preempted: the processes stopped with exit code 75",
    ExitCode.PEER_FAILED: "the processes ended with exit code 71; see their "
    "last lines for the cause",
}
Action = int | str
"""The signal to send to the running processes, or `_SEND_LINE`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one process of a local job.

    Attributes:
      process: The number of the process.
      code: The exit status; -n if signal n killed the process.
      sent: The signals that the launcher had sent to the process.
      name: The name of the process in messages; "" for "process" and its
        number.
    """

    process: int
    code: int
    sent: tuple[int, ...] = ()
    name: str = ""

    @property
    def rank(self) -> int:
        """A number from 0 (probably failed first) to 4 (did not fail).

        If several processes ended, the one with the lowest rank is considered
        the cause of the others.
        """
        if self.code == 0:
            return 4
        if self.code == ExitCode.PREEMPTED:
            return 3
        if -self.code in self.sent:
            return 2
        if self.sent and self.code not in _SELF_MADE:
            # The process may have handled the signal and exited.
            return 2
        return 1 if self.code == ExitCode.PEER_FAILED else 0

    def describe(self) -> str:
        """Returns a description, such as "process 1 was killed by SIGKILL"."""
        name = self.name or f"process {self.process}"
        if -self.code != signal.SIGKILL or signal.SIGKILL not in self.sent:
            return f"{name} {describe_exit(self.code)}"
        return (
            f"{name} was killed by this launcher, because it was still running"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of a local job.

    Attributes:
      code: The exit code for the launcher.
      text: Why the job ended, without a period; "" on success.
      is_final: Whether the launcher was asked to end the job, or can no longer
        write its output.
    """

    code: int
    text: str = ""
    is_final: bool = False


def run_job(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    names: Sequence[str],
) -> JobEnd:
    """Runs one command in several processes until all have ended.

    It must be called in the main thread, because it sets signal handlers that
    are restored when it returns.

    Args:
      words: The command line.
      environments: The environment variables of each process. The first
        process is the chief.
      names: The prefix for the output lines of each process. The chief's lines
        get no prefix.
    """
    return _Job(names).run(words, environments)


def print_line(text: str) -> None:
    """Prints a line of the launcher on stderr."""
    sys.stdout.flush()
    Output().write(2, f"keras-strategies launch: {text}\n".encode())


def find_first_cause(endings: Sequence[Ending]) -> Ending | None:
    """Returns the `Ending` that caused the others; None if no process failed.

    Args:
      endings: The ends of processes, in the order in which they occurred.
    """
    failed = [ending for ending in endings if ending.code]
    return min(failed, key=lambda ending: ending.rank, default=None)


def describe_exit(code: int) -> str:
    """Describes an exit: "was killed by SIGKILL", "ended with exit code 1".

    Args:
      code: The exit status; -n for signal n, as in `subprocess`.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Job:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._children: list[Child] = []
        self._endings: list[Ending] = []
        # The signals sent to each process.
        self._sent = collections.defaultdict[int, set[int]](set)
        self._output = Output()
        self._signals: list[int] = []
        self._plan: list[tuple[float, Action]] = []
        self._is_interrupted = self._is_told_to_end = False
        self._is_unread = False

    def run(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> JobEnd:
        try:
            with self._record_signals():
                problem = self._start(words, environments)
                while self._find_running():
                    self._collect_events()
                    self._act()
                    time.sleep(_POLL_S)
        finally:
            for child in self._children:
                child.close(_SHOW_S)
        if problem:
            return JobEnd(code=1, text=problem)
        return self._conclude()

    def _start(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> str:
        problem = ""
        try:
            for index, environ in enumerate(environments):
                out = self._output, self._names[index]
                self._children.append(Child(index, words, environ, *out))
        except OSError as error:
            problem = (
                f"process {len(self._children)} could not be started: {error}. "
                "Start fewer processes, or check the limits of this machine "
                "(`ulimit -a`)"
            )
            self._follow((0.0, signal.SIGKILL))
        for child in self._children:
            child.show_output()
        return problem

    @contextlib.contextmanager
    def _record_signals(self) -> Iterator[None]:
        """Records signals to the launcher, for `_collect_events` to handle.

        SIGINT and SIGHUP stay ignored if they are ignored, as with `nohup` and
        in a background job of a shell script. The processes inherit this.
        """

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            self._signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {
            number: signal.signal(number, note)
            for number in numbers
            if number == signal.SIGTERM
            or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _find_running(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _collect_events(self) -> None:
        """Handles the processes that ended and the signals that arrived."""
        endings = [
            self._describe_ending(child)
            for child in self._find_running()
            if child.poll() is not None
        ]
        # If several processes ended since the last call, those that were killed
        # (with negative codes) come first: they are the more likely cause.
        endings.sort(key=lambda ending: (ending.rank, ending.code))
        self._endings += endings
        for ending in endings:
            self._answer(ending)
        while self._signals:
            self._obey(self._signals.pop(0))
        if self._output.error is not None and not self._is_unread:
            self._is_unread = True
            self._follow((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))

    def _describe_ending(self, child: Child) -> Ending:
        return Ending(
            process=child.index,
            code=child.code or 0,
            sent=tuple(self._sent[child.index]),
            name="the evaluator" if child.name == "evaluator" else "",
        )

    def _answer(self, ending: Ending) -> None:
        """Plans what to do after one process has ended."""
        end, kill = _FAILED
        if ending.rank in (0, 1):
            later = _PEER_FAILED if ending.rank else 0.0
            reports_itself = ending.rank == 0 and ending.code >= 0
            self._follow(
                (_REPORTS_ITSELF_S if reports_itself else later, _SEND_LINE),
                (later + end, signal.SIGTERM),
                (later + kill, signal.SIGKILL),
            )
        elif ending.rank in (2, 3):
            self._follow((_PREEMPTED, _SEND_LINE), (_PREEMPTED, signal.SIGKILL))

    def _obey(self, number: int) -> None:
        """Plans what to do after the launcher received a signal."""
        self._is_told_to_end = True
        if number != signal.SIGINT:
            self._follow((0.0, signal.SIGTERM), (_PREEMPTED, signal.SIGKILL))
        elif self._is_interrupted:
            self._follow((0.0, signal.SIGKILL))
        else:
            self._is_interrupted = True
            end, kill = _INTERRUPTED
            self._follow(
                (0.0, signal.SIGINT),
                (end, signal.SIGTERM),
                (kill, signal.SIGKILL),
            )

    def _follow(self, *steps: tuple[float, Action]) -> None:
        """Adopts a new plan unless the current plan ends earlier.

        If the current plan is kept, the steps of the new plan that are due
        immediately are added to it.

        Args:
          *steps: The steps of the new plan. Each is a tuple of the number of
            seconds from now and the action.
        """
        now = time.monotonic()
        plan = [(now + seconds, action) for seconds, action in steps]
        if not self._plan or plan[-1][0] < self._plan[-1][0]:
            self._plan = plan
        else:
            self._plan[:0] = [step for step in plan if step[0] <= now]

    def _act(self) -> None:
        """Performs those actions of the plan that are due."""
        now = time.monotonic()
        while self._plan and self._plan[0][0] <= now:
            _, action = self._plan.pop(0)
            for child in self._find_running():
                if isinstance(action, str):
                    cause = find_first_cause(self._endings)
                    line = cause.describe() if cause else "the job ends"
                    child.send_line(line)
                else:
                    self._sent[child.index].add(action)
                    child.send(action)

    def _conclude(self) -> JobEnd:
        """Determines why the job ended."""
        cause = find_first_cause(self._endings)
        if self._is_interrupted:
            text = "interrupted"
            return JobEnd(code=ExitCode.INTERRUPTED, text=text, is_final=True)
        # A failure before the last lines is the cause, not the lost lines.
        if self._output.error is not None and (self._is_unread or not cause):
            is_closed = self._output.error.errno == errno.EPIPE
            code = _CLOSED_OUTPUT if is_closed else _FAILED_OUTPUT
            text = f"the output cannot be written: {self._output.error}"
            return JobEnd(code=code, text=text * (not is_closed), is_final=True)
        if cause is None:
            return JobEnd(code=0, is_final=True)
        return JobEnd(
            code=cause.code if cause.code > 0 else 128 - cause.code,
            text=_ENDS.get(cause.code) or cause.describe(),
            is_final=self._is_told_to_end or self._output.error is not None,
        )
