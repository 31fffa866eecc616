"""Plans each candidate (a topology with a layout) in a separate process."""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from keras_strategies.planning.capture.request import (
    ENVIRONMENT,
    Request,
    parse_answers,
)
from keras_strategies.planning.compile.compiler import count_jobs
from keras_strategies.planning.compile.estimates import write_notes
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.report.table import Plan, live_table
from keras_strategies.planning.seam import (
    make_command_line,
)

_WORKER = "keras_strategies.planning.capture.worker"
_POLL_SECONDS = 0.2
_MAX_END_SECONDS = 10.0
"""How long a script may run after its step was planned, to end by itself."""
_TAIL_BYTES = 16_000
_MAX_TAIL = 2000
_MAX_LINE = 300
"""The largest number of characters of a script's output in an error."""
_MAX_NICENESS = 10
_OF_A_LOG = re.compile(
    # The lines of absl, libtpu and TensorFlow; all but fatal errors.
    r"[IWE]\d{4} [\d:.]+ +\d+ \S+:\d+\]"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IWE] "
    r"|(INFO|WARNING|ERROR):absl:"
    r"|WARNING: (All log messages|Logging) before "
    # What libtpu writes after an error: the place in its source.
    r"|=== Source Location Trace"
    r"|(learning|platforms|third_party)/\S+\.(cc|h):\d+$"
)
_OF_START = re.compile(
    r"I\d{4} [\d:.]+ +\d+ \S+:\d+\]|WARNING: (All log messages|Logging) before "
)
"""Lines that the compilers write when they start."""
_FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ (\S+:\d+\] .*)")
"""A line in which XLA or libtpu reports a failed check, which ends the process.
"""
_NOT_ENTERED = ("TF_CONFIG", "KERAS_STRATEGIES_", "JAX_COORDINATOR_ADDRESS")


def plan_in_processes(
    requests: Sequence[Request],
    num_processes: int | None = None,
    received: Sequence[int] = (),
) -> Plan:
    """Plans candidates and shows a table, to which each adds a row when done.

    If stderr is not a terminal, a line is written when a candidate starts or
    ends.

    Args:
      requests: The candidates.
      num_processes: The number of candidates to plan at the same time. None to
        choose it based on the machine's cores and memory.
      received: The signals that were received; the first one ends the plan
        early. See `first_signal`.

    Returns:
      A plan with one row per candidate, in the order of the requests. Default
      layouts that cannot be planned are left out, except for "replicated". If
      the plan was interrupted, it has the rows that are known so far.
    """
    at_once = num_processes or count_jobs(len(requests))
    # Each process compiles in several threads. On a machine with few cores, no
    # other candidate starts until the first one has sent its preliminary
    # result, so that the table has a row early.
    is_busy = len(os.sched_getaffinity(0)) < 2 * at_once
    waiting = collections.deque(enumerate(requests))
    running: dict[int, _Process] = {}
    rows: dict[int, PlannedStep] = {}
    progress = Progress(sys.stderr)

    def count_done() -> str:
        number = len(requests) - len(waiting) - len(running)
        return f"{number} of {len(requests)}"

    with live_table() as show, contextlib.ExitStack() as stack:
        stack.callback(lambda: [p.end() for p in running.values()])
        while (waiting or running) and not received:
            while waiting and len(running) < (
                1 if is_busy and not rows else at_once
            ):
                index, request = waiting.popleft()
                known = {f"{x.topology} {x.layout}" for x in rows.values()}
                if request.name in known:  # See `_sort_steps`.
                    continue
                running[index] = _Process(index, request)
                progress.write(f"planning {request.name} ({count_done()} done)")
            time.sleep(_POLL_SECONDS)
            for index, process in list(running.items()):
                row = process.read_row()
                if process.is_done():
                    rows.pop(index, None)
                    row = running.pop(index).end()
                    progress.write(
                        f"{process.request.name} took {process.age:.0f} s "
                        f"({count_done()} done)"
                    )
                if row is not None:
                    rows[index] = row
            names = ", ".join(p.request.name for p in running.values())
            progress.remind(f"still planning {names} ({count_done()} done)")
            show(_sort_steps(rows), f"{count_done()}: {names}")
    notes = write_notes(request.topology for request in requests)
    if waiting or running:
        note = (
            f"The plan was interrupted after {count_done()} candidates. A row "
            "that is marked with ~ may be preliminary."
        )
        notes = (*notes, note)
    return Plan(steps=_sort_steps(rows), notes=notes)


def _sort_steps(steps: Mapping[int, PlannedStep]) -> tuple[PlannedStep, ...]:
    """Returns the steps in the order of the requests, each candidate once.

    The layout that a script itself uses may also be one of the default layouts.
    """
    found: dict[tuple[str, str], PlannedStep] = {}
    for index in sorted(steps):
        step = steps[index]
        found.setdefault((step.topology, step.layout), step)
    return tuple(found.values())


class _Process:
    """A child process that plans one candidate."""

    def __init__(self, index: int, request: Request) -> None:
        self.request = request
        self._start, self._answered = time.monotonic(), 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # The answers are not sent through a pipe, because children that the
        # script forks would keep it open.
        self._answers = tempfile.TemporaryFile()  # noqa: SIM115
        file = self._answers.fileno()
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_ENTERED)
        }
        words = make_command_line(
            _WORKER, str(file), request.to_text(), str(os.getpid())
        )
        self._process = subprocess.Popen(
            words,
            env=environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[file],
            # A new session, so that `end` can kill the process together with
            # all processes that the script has started.
            start_new_session=True,
        )
        # Earlier candidates have a higher priority.
        niceness = os.nice(0) + min(index, _MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    @property
    def age(self) -> float:
        """The number of seconds since the process was started."""
        return time.monotonic() - self._start

    def _read_answers(self) -> dict[str, Any]:
        """Returns the answers that the process has written so far."""
        size = os.fstat(self._answers.fileno()).st_size
        return parse_answers(os.pread(self._answers.fileno(), size, 0))

    def is_done(self) -> bool:
        """Returns whether the process has ended, or has answered for long.

        After the answer a script has some time to clean up and to end. It may
        catch all errors and train again, forever.
        """
        if self._process.poll() is not None:
            return True
        if not self._answered and self._read_answers().keys() - {"row"}:
            self._answered = self.age
        return 0 < self._answered < self.age - _MAX_END_SECONDS

    def read_row(self) -> PlannedStep | None:
        """Returns the preliminary result that the process has sent, or None."""
        row = self._read_answers().get("row")
        return None if row is None else PlannedStep.from_json(row)

    def end(self) -> PlannedStep | None:
        """Ends the process, and all processes that the script has started.

        Returns:
          The candidate's result; None if it gets no row in the table.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with self._answers, self._log as log:
            answers, request = self._read_answers(), self.request
            log.seek(max(log.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
        error = answers.get("error")
        if "step" in answers:
            step = PlannedStep.from_json(answers["step"])
            if step.error is None or not request.is_default:
                return step
            error = step.error
        elif error is None:
            error = _explain_end(code, lines, answers.get("ended"))
        if request.is_default and request.layout != "replicated":
            # The user did not request this default layout, so it gets no row.
            # An error that occurs with all layouts is shown once, in the row of
            # "replicated".
            return None
        return PlannedStep(
            topology=request.topology,
            layout=request.layout,
            num_devices=0,
            num_replicas=0,
            rows=0,
            limit_bytes=None,
            error=str(error),
        )


def _explain_end(
    code: int, lines: Sequence[str], ended: str | None = None
) -> str:
    """Returns why a process has ended without a result.

    Args:
      code: The process's exit status.
      lines: The lines that it has written last.
      ended: The message of a script that has ended before it trained.
    """
    if ended is not None:
        # The last line of the script's output usually explains why it ended.
        wrote = "".join(
            f" Its last output: {line[-_MAX_LINE:]!r}."
            for line in find_last_line(lines)
        )
        return f"{ended}{wrote}"
    fatal = [match[1] for match in map(_FATAL.match, lines) if match]
    if fatal:
        return (
            "A fatal error of a library, such as the compiler, ended the "
            f"planning process: {fatal[-1].strip()[:_MAX_LINE]}. If it is the "
            "compiler's, training on these devices would end, too. Use another "
            "layout."
        )
    text = f"The planning process ended with exit status {code}."
    lines = [line for line in lines if not _OF_START.match(line)]
    tail = "\n".join(lines[-12:]).strip()[-_MAX_TAIL:]
    return text + (tail and f" Its last output:\n{tail}")


def find_last_line(lines: Sequence[str]) -> list[str]:
    """Returns a list of the last line that a script has written, if any.

    Blank lines and lines of libraries' logs are left out.
    """
    words = [line for line in lines if line.strip()]
    return [line for line in words if not _OF_A_LOG.match(line)][-1:]


class Progress:
    """Writes lines to a file, unless it is a terminal, which shows a table.

    Args:
      file: The file, such as `sys.stderr`.
      clock: A function that returns the time in seconds.
    """

    def __init__(
        self, file: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = None if file.isatty() else file
        self._clock = clock
        self._last, self._wait = clock(), 60.0

    def write(self, text: str) -> None:
        """Writes a line."""
        self._last = self._clock()
        if self._file is not None:
            # The reader of a pipe may have ended.
            with contextlib.suppress(OSError):
                print(f"keras-strategies plan: {text}", file=self._file)
                self._file.flush()

    def remind(self, text: str) -> None:
        """Writes a line if none was written for long; each time for longer."""
        if self._clock() - self._last >= self._wait:
            self._wait *= 2
            self.write(text)


@contextlib.contextmanager
def first_signal() -> Iterator[list[int]]:
    """Stores the first SIGINT or SIGTERM; a second one ends the process.

    Stores nothing outside of the main thread, which cannot handle signals. A
    SIGINT that is ignored, as in a background job of a shell script, stays
    ignored.

    Yields:
      A list to which the signal's number is added when it is received.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    if before.get(signal.SIGINT) == signal.SIG_IGN:
        del before[signal.SIGINT]

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def store(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in before:
        signal.signal(number, store)
    try:
        yield received
    finally:
        restore()
