"""The supervision of a job's local processes until all have ended.

What happens to one of them decides what is done with the others: the rules
are in `_Job`, as plans of what to do at which time.
"""

import collections
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from keras_strategies.cli.launch.local_process import Child, Output
from keras_strategies.cluster.exchange.exit_codes import ExitCode

# Exit codes of processes that ended by themselves, though asked to end.
_SELF_MADE = (ExitCode.FAILED, ExitCode.STALLED, ExitCode.PEER_FAILED)
_CLOSED_OUTPUT = 141
_FAILED_OUTPUT = 74  # EX_IOERR
_POLL_S = 0.02
_SHOW_S = 2.0
# Survivors hear of a failure at once, and have this long to say it and go.
_FAILED = (0.6, 0.9)
# Who ends itself has told the others more than the launcher knows.
_REPORTS_ITSELF_S = 0.4
# A process that says that a peer failed may be ahead of that peer, which
# waits a second for others to hear its error.
_PEER_FAILED = 1.0
# Kubernetes and SLURM kill 30 seconds after SIGTERM.
_PREEMPTED = 25.0
_INTERRUPTED = (5.0, 8.0)
_SEND_LINE = "tell"
Action = int | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended.

    Attributes:
      process: Its number.
      code: Its exit status; negative for a signal.
      sent: The signals it had been sent by the launcher.
      name: What it is called; "process" and its number if "".
    """

    process: int
    code: int
    sent: tuple[int, ...] = ()
    name: str = ""

    @property
    def rank(self) -> int:
        """How far it is from being a cause; 0 is one, 4 no failure."""
        if self.code == 0:
            return 4
        if self.code == ExitCode.PREEMPTED:
            return 3
        if -self.code in self.sent:
            return 2
        if self.sent and self.code not in _SELF_MADE:
            # It may have ended itself when it was told to.
            return 2
        return 1 if self.code == ExitCode.PEER_FAILED else 0

    def describe(self) -> str:
        """ "process 1 was killed by SIGKILL", for messages."""
        name = self.name or f"process {self.process}"
        return f"{name} {described(self.code)}"


def run_job(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    names: Sequence[str],
) -> int:
    """Runs one command in several processes until all have ended.

    Called in the main thread, whose signal handlers it sets meanwhile.

    Args:
      words: The command line.
      environments: The variables of each process; the first is the chief.
      names: What is shown in front of the lines of each other process.

    Returns:
      The exit code for the launcher.
    """
    return _Job(names).run(words, environments)


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """The ending that explains the others; None if nothing failed.

    Args:
      endings: In the order of time.
    """
    failed = [ending for ending in endings if ending.code]
    return min(failed, key=lambda ending: ending.rank, default=None)


def described(code: int) -> str:
    """How a process ended: "was killed by SIGKILL", "ended with exit code 1".

    Args:
      code: Its exit status; negative for a signal, as in `subprocess`.
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
        self._sent = collections.defaultdict[int, tuple[int, ...]](tuple)
        self._output = Output()
        self._signals: list[int] = []
        self._plan: list[tuple[float, Action]] = []
        self._is_interrupted = False
        self._is_unread = False

    def run(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> int:
        try:
            with self._handlers():
                fault = self._start(words, environments)
                while self._running():
                    self._look()
                    self._act()
                    time.sleep(_POLL_S)
        finally:
            for child in self._children:
                child.close(_SHOW_S)
        if fault:
            self._print_line(fault)
            return 1
        return self._conclude()

    def _start(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> str:
        fault = ""
        try:
            for index, environ in enumerate(environments):
                child = Child(
                    index, words, environ, self._output, self._names[index]
                )
                self._children.append(child)
        except OSError as error:
            fault = (
                f"process {len(self._children)} could not be started: {error}. "
                "Start fewer processes, or look at the limits of this machine "
                "(`ulimit -a`)."
            )
            self._follow((0.0, signal.SIGKILL))
        for child in self._children:
            child.show_output()
        return fault

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        """Signals are noted, and looked at between two looks at children."""

        def note(number: int, frame: FrameType | None) -> None:
            del frame
            self._signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.code is None]

    def _look(self) -> None:
        """Notes who has ended since the last look, and which signals came."""
        found = [
            Ending(
                process=child.index,
                code=child.code or 0,
                sent=self._sent[child.index],
                name="the evaluator" if child.name == "evaluator" else "",
            )
            for child in self._running()
            if child.poll() is not None
        ]
        # If several ended in one moment, one that was killed came first.
        found.sort(key=lambda ending: (ending.rank, ending.code))
        self._endings += found
        for ending in found:
            self._answer(ending)
        while self._signals:
            self._obey(self._signals.pop(0))
        if self._output.is_closed and not self._is_unread:
            self._is_unread = True
            self._follow((0.0, signal.SIGTERM), (1.0, signal.SIGKILL))

    def _answer(self, ending: Ending) -> None:
        """Plans what follows from the end of one process."""
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
        """Plans what follows from a signal to the launcher."""
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
        """Takes a plan, in seconds from now, unless the present one is faster.

        What it does at once is done in any case.
        """
        now = time.monotonic()
        plan = [(now + seconds, action) for seconds, action in steps]
        if not self._plan or plan[-1][0] < self._plan[-1][0]:
            self._plan = plan
        else:
            self._plan[:0] = [step for step in plan if step[0] <= now]

    def _act(self) -> None:
        """Does what is due."""
        now = time.monotonic()
        while self._plan and self._plan[0][0] <= now:
            _, action = self._plan.pop(0)
            for child in self._running():
                if isinstance(action, str):
                    cause = first_cause(self._endings)
                    told = cause.describe() if cause else "the job ends"
                    child.send_line(told)
                else:
                    self._sent[child.index] += (action,)
                    child.send(action)

    def _conclude(self) -> int:
        """Says how it ended, in one line if something failed."""
        cause, fault = first_cause(self._endings), self._output.fault
        if self._is_interrupted:
            self._print_line("interrupted; all processes have ended.")
            return ExitCode.INTERRUPTED
        if fault:
            self._print_line(f"{fault}; the job has ended.")
        if self._is_unread or (fault and cause is None):
            return _FAILED_OUTPUT if fault else _CLOSED_OUTPUT
        if cause is None:
            return 0
        if cause.code == ExitCode.PREEMPTED:
            said = "preempted: the processes have stopped (exit code 75)."
        elif cause.code == ExitCode.PEER_FAILED:
            # No process failed by itself: one may have ended too early, with 0.
            said = (
                "the processes ended with exit code 71; their last lines say "
                "why; the job has ended."
            )
        else:
            said = f"{cause.describe()}; the job has ended."
        self._print_line(said)
        return cause.code if cause.code > 0 else 128 - cause.code

    def _print_line(self, text: str) -> None:
        sys.stdout.flush()
        self._output.write(2, f"keras-strategies launch: {text}\n".encode())
