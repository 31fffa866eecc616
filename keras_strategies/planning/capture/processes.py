"""The planning of a command's candidates, each in a process of its own."""

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
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
from keras_strategies.planning.report.table import NOTES, LiveTable, Plan

_WORKER = "keras_strategies.planning.capture.worker"
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
    with LiveTable() as live, contextlib.closing(pool):
        while pool.is_busy:
            rows = pool.start()
            names = ", ".join(p.request.name for p in pool.running.values())
            count = f"{len(pool.steps)} of {len(requests)}"
            live.update(_in_order(rows | pool.steps), f"{count}: {names}")
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
      running: Processes by the file descriptors of their answers.
      steps: Finished steps by their candidates' indices.
    """

    def __init__(self, requests: Sequence[Request], at_once: int) -> None:
        self.running: dict[int, _Process] = {}
        self.steps: dict[int, PlannedStep] = {}
        self._waiting = collections.deque(enumerate(requests))
        self._at_once = at_once
        self._selector = selectors.DefaultSelector()
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
            process = _Process(*self._waiting.popleft())
            self.running[process.file] = process
            self._selector.register(process.file, selectors.EVENT_READ)
        rows = {p.index: p.row() for p in self.running.values()}
        known = {index: row for index, row in rows.items() if row is not None}
        self._is_first &= not self.steps and not known
        return known

    def collect(self) -> None:
        """Waits for answers for a second, and reads them."""
        ended = {f for f, p in self.running.items() if p.has_ended()}
        ready = {key.fd for key, _ in self._selector.select(timeout=1.0)}
        for file in ready | ended:
            process = self.running[file]
            if file in ready and process.read():
                continue
            self._selector.unregister(file)
            del self.running[file]
            step = _step_of(process.request, process.end())
            if step is not None:
                self.steps[process.index] = step

    def close(self) -> None:
        """Ends what is still running."""
        for process in self.running.values():
            process.end()
        self._selector.close()


class _Process:
    """One candidate's process."""

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.answer = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_NOT_ENTERED)
        }
        words = command_line(
            _WORKER, str(writing), request.to_text(), str(os.getpid())
        )
        try:
            self._process = subprocess.Popen(
                words,
                env=environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                # What the script starts ends with it.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        # The machine computes for the first candidates first.
        niceness = os.nice(0) + min(index, _MAX_NICENESS)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        self.file = reading

    def read(self) -> bool:
        """Reads what has come, and returns whether there will be more."""
        part = os.read(self.file, 65536)
        self.answer += part
        if part.endswith(b"\n") and answer_of(self.answer) is not None:
            # Processes that the script forked may hold the pipe open.
            return False
        return bool(part) and len(self.answer) <= MAX_ANSWER_BYTES

    def has_ended(self) -> bool:
        """Returns whether it has: its answer can be read."""
        return self._process.poll() is not None

    def row(self) -> PlannedStep | None:
        """Returns what it knew of the step before its last answer."""
        whole, _, _ = self.answer.rpartition(b"\n")
        answer = answer_of(whole, names=("row",))
        return None if answer is None else PlannedStep.from_json(answer["row"])

    def end(self) -> dict[str, Any]:
        """Ends the process, and returns its answer."""
        os.close(self.file)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        with self._log as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(size - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
        found = answer_of(self.answer)
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
