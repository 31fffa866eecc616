"""The planning of a command's candidates, each in a process of its own."""

import collections
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.child_program import command_line
from keras_strategies.planning.capture.request import (
    ENVIRONMENT,
    MAX_ANSWER_BYTES,
    Request,
    answer_of,
)
from keras_strategies.planning.compile.compiler import num_jobs
from keras_strategies.planning.report.planned_step import PlannedStep
from keras_strategies.planning.report.table import NOTES, Plan, live_table

_WORKER = "keras_strategies.planning.capture.worker"
_POLL_SECONDS = 0.2
_TAIL_BYTES = 4000
_MAX_NICENESS = 10
_NOT_ENTERED = ("TF_CONFIG", "KERAS_STRATEGIES_", "JAX_COORDINATOR_ADDRESS")


def plan_in_processes(
    requests: Sequence[Request], num_processes: int | None = None
) -> Plan:
    """Plans candidates, and shows the table while it is filled.

    Args:
      requests: The candidates.
      num_processes: Candidates at once; None: by the machine.

    Returns:
      The steps of the candidates that have one, in their order.
    """
    pool = _Pool(requests, num_processes or num_jobs(len(requests)))
    with live_table() as show, contextlib.closing(pool):
        while pool.is_busy:
            rows = pool.start()
            names = ", ".join(p.request.name for p in pool.running)
            count = f"{len(pool.steps)} of {len(requests)}"
            show(_in_order(rows | pool.steps), f"{count}: {names}")
            pool.collect()
    return Plan(steps=_in_order(pool.steps), notes=NOTES)


def _in_order(steps: Mapping[int, PlannedStep]) -> tuple[PlannedStep, ...]:
    return tuple(steps[index] for index in sorted(steps))


class _Pool:
    """The processes of candidates.

    Args:
      requests: The candidates.
      at_once: The most processes at a time.

    Attributes:
      running: The processes that have not ended.
      steps: Finished steps by their candidates' indices.
    """

    def __init__(self, requests: Sequence[Request], at_once: int) -> None:
        self.running: list[_Process] = []
        self.steps: dict[int, PlannedStep] = {}
        self._waiting = collections.deque(enumerate(requests))
        self._at_once = at_once
        # Each compiles in threads. With fewer cores the first line of the
        # table comes before the second one is begun.
        self._is_first = len(os.sched_getaffinity(0)) < 2 * at_once

    @property
    def is_busy(self) -> bool:
        """Whether a candidate has not ended."""
        return bool(self._waiting or self.running)

    def start(self) -> dict[int, PlannedStep]:
        """Starts processes, and returns what running ones know so far."""
        while self._waiting and len(self.running) < (
            1 if self._is_first else self._at_once
        ):
            self.running.append(_Process(*self._waiting.popleft()))
        rows = {p.index: p.row() for p in self.running}
        known = {index: row for index, row in rows.items() if row is not None}
        self._is_first &= not self.steps and not known
        return known

    def collect(self) -> None:
        """Waits a moment, and takes the answers that have come."""
        time.sleep(_POLL_SECONDS)
        for process in [p for p in self.running if p.has_answered()]:
            self.running.remove(process)
            step = _step_of(process.request, process.end())
            if step is not None:
                self.steps[process.index] = step

    def close(self) -> None:
        """Ends what is still running."""
        for process in self.running:
            process.end()


class _Process:
    """One candidate's process."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # No pipe, which what the script forks would hold open.
        self._answers = tempfile.TemporaryFile()  # noqa: SIM115
        file = self._answers.fileno()
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_ENTERED)
        }
        words = command_line(
            _WORKER, str(file), request.to_text(), str(os.getpid())
        )
        self._process = subprocess.Popen(
            words,
            env=environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[file],
            # What the script starts ends with it.
            start_new_session=True,
        )
        # The machine computes for the first candidates first.
        niceness = os.nice(0) + min(index, _MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def _written(self) -> bytes:
        """Returns what it has written so far."""
        return os.pread(self._answers.fileno(), MAX_ANSWER_BYTES, 0)

    def has_answered(self) -> bool:
        """Returns whether its last answer is there, or it has ended."""
        has_ended = self._process.poll() is not None
        return has_ended or answer_of(self._written()) is not None

    def row(self) -> PlannedStep | None:
        """Returns what it knew of the step before its last answer."""
        whole, _, _ = self._written().rpartition(b"\n")
        answer = answer_of(whole, names=("row",))
        return None if answer is None else PlannedStep.from_json(answer["row"])

    def end(self) -> dict[str, Any]:
        """Ends the process, and returns its answer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with self._log as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(size - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
        with self._answers:
            found = answer_of(self._written())
        if found is None:
            tail = "\n".join(lines[-12:])
            return {"error": f"The process ended ({code}).\n{tail}"}
        if "ended" in found:
            # Why is in what the script wrote.
            last = [line for line in lines if line.strip()][-1:]
            wrote = "".join(f" It wrote last: {line!r}." for line in last)
            return {"error": f"{found['ended']}{wrote}"}
        return found


def _step_of(request: Request, answer: Mapping[str, Any]) -> PlannedStep | None:
    error = answer.get("error")
    if "step" in answer:
        step = PlannedStep.from_json(answer["step"])
        if step.error is None or not request.is_default:
            return step
        error = step.error
    if request.is_default and request.layout != "replicated":
        # Nobody asked for it. What is wrong with all is reported once.
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
