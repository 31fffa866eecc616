"""Plans each candidate (a topology with a layout) in a separate process."""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.child_program import make_command_line
from keras_strategies.planning.capture.progress import (
    Interruption,
    Progress,
)
from keras_strategies.planning.capture.request import (
    ENVIRONMENT,
    MAX_ANSWER_BYTES,
    Request,
    parse_answer,
)
from keras_strategies.planning.compile.compiler import count_jobs
from keras_strategies.planning.compile.estimates import write_notes
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.report.table import Plan, live_table

_WORKER = "keras_strategies.planning.capture.worker"
_POLL_SECONDS = 0.2
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
    interruption: Interruption | None = None,
) -> Plan:
    """Plans candidates and shows a table, to which each adds a row when done.

    If stderr is not a terminal, a line is written when a candidate starts or
    ends.

    Args:
      requests: The candidates.
      num_processes: The number of candidates to plan at the same time. None to
        choose it based on the machine's cores and memory.
      interruption: A signal that ends the plan early.

    Returns:
      A plan with one row per candidate, in the order of the requests. Default
      layouts that cannot be planned are left out, except for "replicated". If
      the plan was interrupted, it has the rows that are known so far.
    """
    pool = _Pool(requests, num_processes or count_jobs(len(requests)))
    interruption = interruption or Interruption()
    progress = Progress(len(requests), sys.stderr)
    rows: dict[int, PlannedStep] = {}
    with live_table() as show, contextlib.closing(pool):
        while pool.is_busy and interruption.signal is None:
            rows = pool.start()
            running = [p.request.name for p in pool.running]
            progress.update(running, pool.num_done)
            count = f"{pool.num_done} of {len(requests)}"
            show(
                _sort_steps(rows | pool.steps), f"{count}: {', '.join(running)}"
            )
            pool.collect()
        progress.update([p.request.name for p in pool.running], pool.num_done)
    notes = write_notes(request.topology for request in requests)
    if not pool.is_busy:
        return Plan(steps=_sort_steps(pool.steps), notes=notes)
    note = (
        f"The plan was interrupted after {pool.num_done} of {len(requests)} "
        "candidates. A row that is marked with ~ may be preliminary."
    )
    return Plan(steps=_sort_steps(rows | pool.steps), notes=(*notes, note))


def _sort_steps(steps: Mapping[int, PlannedStep]) -> tuple[PlannedStep, ...]:
    """Returns the steps in the order of the requests, each candidate once.

    The layout that a script itself uses may also be one of the default layouts.
    """
    found: dict[tuple[str, str], PlannedStep] = {}
    for index in sorted(steps):
        step = steps[index]
        found.setdefault((step.topology, step.layout), step)
    return tuple(found.values())


class _Pool:
    """Starts the candidates' processes and collects their results.

    Args:
      requests: The candidates.
      at_once: The maximum number of processes that run at the same time.

    Attributes:
      running: The processes that have not ended.
      steps: The final results, by the indices of their candidates.
    """

    def __init__(self, requests: Sequence[Request], at_once: int) -> None:
        self.running: list[_Process] = []
        self.steps: dict[int, PlannedStep] = {}
        self._num_requests = len(requests)
        self._waiting = collections.deque(enumerate(requests))
        self._at_once = at_once
        # Each process compiles in several threads. On a machine with few cores,
        # no other candidate starts until the first one has sent its preliminary
        # result, so that the table has a row early.
        self._is_first = len(os.sched_getaffinity(0)) < 2 * at_once

    @property
    def num_done(self) -> int:
        """The number of candidates that are neither waiting nor running."""
        return self._num_requests - len(self._waiting) - len(self.running)

    @property
    def is_busy(self) -> bool:
        """Whether any candidate is still waiting or running."""
        return bool(self._waiting or self.running)

    def start(self) -> dict[int, PlannedStep]:
        """Starts processes, and returns preliminary results of running ones.

        Returns:
          A dict from the indices of candidates to their preliminary results.
        """
        while self._waiting and len(self.running) < (
            1 if self._is_first else self._at_once
        ):
            self.running.append(_Process(*self._waiting.popleft()))
        rows = {p.index: p.row() for p in self.running}
        known = {index: row for index, row in rows.items() if row is not None}
        self._is_first &= not self.steps and not known
        return known

    def collect(self) -> None:
        """Waits briefly, and stores the results of finished candidates."""
        time.sleep(_POLL_SECONDS)
        for process in [p for p in self.running if p.has_answered()]:
            self.running.remove(process)
            step = _make_step(process.request, process.end())
            if step is not None:
                self.steps[process.index] = step

    def close(self) -> None:
        """Ends the processes that are still running."""
        for process in self.running:
            process.end()


class _Process:
    """A child process that plans one candidate."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
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

    def _read_answers(self) -> bytes:
        """Returns the answers that the process has written so far."""
        return os.pread(self._answers.fileno(), MAX_ANSWER_BYTES, 0)

    def has_answered(self) -> bool:
        """Returns whether the process has sent its last answer or ended."""
        has_ended = self._process.poll() is not None
        return has_ended or parse_answer(self._read_answers()) is not None

    def row(self) -> PlannedStep | None:
        """Returns the preliminary result that the process has sent, or None."""
        whole, _, _ = self._read_answers().rpartition(b"\n")
        answer = parse_answer(whole, names=("row",))
        return None if answer is None else PlannedStep.from_json(answer["row"])

    def end(self) -> dict[str, Any]:
        """Ends the process and returns its last answer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with self._log as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(size - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
        with self._answers:
            answer = parse_answer(self._read_answers())
        if answer is None:
            return {"error": _explain_end(code, lines)}
        if "ended" in answer:
            # The last line of the script's output usually explains why it
            # ended.
            wrote = "".join(
                f" Its last output: {line[-_MAX_LINE:]!r}."
                for line in find_last_line(lines)
            )
            return {"error": f"{answer['ended']}{wrote}"}
        return answer


def _explain_end(code: int, lines: Sequence[str]) -> str:
    """Returns why a process has ended without an answer."""
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


def _make_step(
    request: Request, answer: Mapping[str, Any]
) -> PlannedStep | None:
    error = answer.get("error")
    if "step" in answer:
        step = PlannedStep.from_json(answer["step"])
        if step.error is None or not request.is_default:
            return step
        error = step.error
    if request.is_default and request.layout != "replicated":
        # The user did not request this default layout, so it gets no row. An
        # error that occurs with all layouts is shown once, in the row of
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
