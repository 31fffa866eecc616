"""Plans each candidate (a topology with a layout) in a separate process."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from keras_strategies.planning.capture.request import ENVIRONMENT, Request
from keras_strategies.planning.compile.compiler import count_jobs
from keras_strategies.planning.compile.estimates import write_notes
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.report.table import Plan
from keras_strategies.planning.seam import make_command_line

_WORKER = "keras_strategies.planning.capture.worker"
_POLL_SECONDS = 0.2
_MAX_END_SECONDS = 10.0
"""How long a script may run after its step was planned, to end by itself."""
_TAIL_BYTES = 16_000
_MAX_TAIL = 2000
_MAX_LINES = 12
_FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ \S+:\d+\] ")
"""The start of a line in which XLA or libtpu reports a failed check, which ends
the process."""
_NOT_ENTERED = ("TF_CONFIG", "KERAS_STRATEGIES_", "JAX_COORDINATOR_ADDRESS")


def plan_in_processes(requests: Sequence[Request]) -> tuple[Plan, bool]:
    """Plans candidates, and writes a line when one starts or ends.

    Args:
      requests: The candidates. The machine's cores and memory determine how
        many of them are planned at the same time.

    Returns:
      A plan with one row per candidate, in the order of the requests, and
      whether it is complete. Default layouts that cannot be planned are left
      out, except for "replicated". If the plan was interrupted (SIGINT), it has
      the rows that are known so far.
    """
    at_once = count_jobs(len(requests))
    waiting = collections.deque(enumerate(requests))
    running: dict[int, _Process] = {}
    rows: dict[int, PlannedStep | None] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, request = waiting.popleft()
                running[index] = _Process(request)
                _write(f"planning {request.name}")
            time.sleep(_POLL_SECONDS)
            for index, process in list(running.items()):
                if process.is_done():
                    rows[index] = running.pop(index).end()
                    done = f"{len(rows)} of {len(requests)} done"
                    _write(f"{process.request.name} was planned ({done})")
    except KeyboardInterrupt:
        _write("interrupted")
    finally:
        for process in running.values():
            process.end()
    notes = write_notes(request.topology for request in requests)
    is_complete = len(rows) == len(requests)
    if not is_complete:
        count = f"{len(rows)} of {len(requests)}"
        notes = *notes, f"The plan was interrupted after {count} candidates."
    steps = _drop_duplicates(rows[index] for index in sorted(rows))
    return Plan(steps=steps, notes=notes), is_complete


def _write(text: str) -> None:
    # The reader of a pipe may have ended.
    with contextlib.suppress(OSError):
        print(f"keras-strategies plan: {text}", file=sys.stderr, flush=True)


def _drop_duplicates(
    steps: Iterable[PlannedStep | None],
) -> tuple[PlannedStep, ...]:
    """Returns the steps, each candidate once.

    The layout that a script itself uses may also be one of the default layouts.
    """
    found: dict[tuple[str, str], PlannedStep] = {}
    for step in filter(None, steps):
        found.setdefault((step.topology, step.layout), step)
    return tuple(found.values())


class _Process:
    """A child process that plans one candidate."""

    def __init__(self, request: Request) -> None:
        self.request, self._answered = request, 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # The answer is not sent through a pipe, because children that the
        # script forks would keep it open.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        file = self._answer.fileno()
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

    def _read_answer(self) -> dict[str, Any] | None:
        """Returns the answer that the process has written, or None."""
        size = os.fstat(self._answer.fileno()).st_size
        line, end, _ = os.pread(self._answer.fileno(), size, 0).partition(b"\n")
        return json.loads(line) if end else None

    def is_done(self) -> bool:
        """Returns whether the process has ended, or has answered for long.

        After the answer a script has some time to clean up and to end. It may
        catch all errors and train again, forever.
        """
        if self._process.poll() is not None:
            return True
        if not self._answered and self._read_answer():
            self._answered = time.monotonic()
        waited = time.monotonic() - self._answered
        return bool(self._answered) and waited > _MAX_END_SECONDS

    def end(self) -> PlannedStep | None:
        """Ends the process, and all processes that the script has started.

        Returns:
          The candidate's result; None if it gets no row in the table.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with self._answer, self._log as log:
            answer, request = self._read_answer() or {}, self.request
            log.seek(max(log.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
        if "step" in answer:
            step = PlannedStep.from_json(answer["step"])
            if step.error is None or not request.is_default:
                return step
            answer = {"error": step.error}
        if request.is_default and request.layout != "replicated":
            # The user did not request this default layout, so it gets no row.
            # An error that occurs with all layouts is shown once, in the row of
            # "replicated".
            return None
        return PlannedStep(
            topology=request.topology,
            layout=request.layout,
            error=_explain_end(code, lines, answer),
        )


def _explain_end(
    code: int, lines: Sequence[str], answer: dict[str, Any]
) -> str:
    """Returns why a process has ended without a result.

    Args:
      code: The process's exit status.
      lines: The lines that it has written last.
      answer: The answer that it has sent, or {}.
    """
    ended = f"The planning process ended with exit status {code}."
    text = answer.get("error", ended)
    if answer and not answer.get("is_ended"):
        return text
    # The script's output usually explains why it ended.
    fatal = [line for line in lines if _FATAL.match(line)]
    shown = "\n".join((fatal or lines)[-_MAX_LINES:]).strip()[-_MAX_TAIL:]
    return text + (shown and f" Its last output:\n{shown}")
