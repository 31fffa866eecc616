"""`keras-strategies plan`: candidates in processes of their own, as a table."""

import collections
import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_strategies.cli.plan.child_program import command_line
from keras_strategies.cli.plan.request import (
    MAX_ANSWER_BYTES,
    Request,
    answer_of,
)
from keras_strategies.strategy.planning.planned_step import PlannedStep

_WORKER = "keras_strategies.cli.plan.worker"
_WRONG_ARGUMENTS = 2
_BYTES_OF_PROCESS = 3e9
_MOST_PROCESSES = 8
_TAIL_BYTES = 4000
_MOST_NICE = 10
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # libtpu asks nobody what machine this is, and several use it at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_NOT_ENTERED = ("TF_CONFIG", "KERAS_STRATEGIES_", "JAX_COORDINATOR_ADDRESS")


class _Process:
    """One candidate's process."""

    def __init__(self, request: Request) -> None:
        self.request = request
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
                env=environ | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                # What the script starts ends with it.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self.file = reading

    def read(self) -> bool:
        """Takes in what has come; whether there will be more."""
        part = os.read(self.file, 65536)
        self.answer += part
        if part.endswith(b"\n") and answer_of(self.answer) is not None:
            # Processes that the script forked may hold the pipe open.
            return False
        return bool(part) and len(self.answer) <= MAX_ANSWER_BYTES

    def has_ended(self) -> bool:
        """Whether it has: what it answered is there to be read."""
        return self._process.poll() is not None

    def row(self) -> Any:
        """What it knew of the step before its last answer; None: nothing."""
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
            tail = log.read().decode(errors="replace")
        found = answer_of(self.answer)
        if found is None:
            lines = "\n".join(tail.splitlines()[-12:])
            found = {"error": f"The process ended ({code}).\n{lines}"}
        elif "ended" in found:
            # Why is in what the script wrote.
            last = [line for line in tail.splitlines() if line.strip()][-1:]
            wrote = "".join(f" It wrote last: {line!r}." for line in last)
            found = {"error": f"{found['ended']}{wrote}"}
        return found


def plan(
    requests: Sequence[Request],
    *,
    as_json: bool,
    html: str | None,
    num_processes: int | None = None,
) -> int:
    """Plans candidates, and prints the table.

    Args:
      requests: The candidates.
      as_json: Whether JSON is printed instead.
      html: A file for the page, too.
      num_processes: How many candidates at once; None: by the machine.

    Returns:
      The exit status: 0, 1 if no candidate could be planned.
    """
    from rich.console import Console

    from keras_strategies.strategy.planning.plan import NOTES, Plan

    steps = _answers(requests, num_processes or _num_processes(len(requests)))
    made = Plan(steps=tuple(steps), notes=NOTES)
    if html is not None:
        pathlib.Path(html).write_text(made.to_html(), "utf-8")
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
    else:
        Console().print(made)
    return 0 if any(step.error is None for step in steps) else 1


def _num_processes(count: int) -> int:
    cores = len(os.sched_getaffinity(0))
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    by_memory = int(pages * size // _BYTES_OF_PROCESS)
    return max(min(count, cores, by_memory, _MOST_PROCESSES), 1)


def _has_cores_for(at_once: int) -> bool:
    """Whether candidates do not delay each other: each compiles in threads.

    Else the first line of the table comes before the second one is begun.
    """
    return len(os.sched_getaffinity(0)) >= 2 * at_once


def _answers(requests: Sequence[Request], at_once: int) -> list[Any]:
    """The steps of all candidates that have one, in their order."""
    waiting = collections.deque(enumerate(requests))
    running: dict[int, tuple[int, _Process]] = {}
    found: dict[int, Any] = {}
    selector = selectors.DefaultSelector()
    shown = _Shown(requests)
    is_first = not _has_cores_for(at_once)
    try:
        with shown:
            while waiting or running:
                while waiting and len(running) < (1 if is_first else at_once):
                    index, request = waiting.popleft()
                    process = _Process(request)
                    running[process.file] = index, process
                    selector.register(process.file, selectors.EVENT_READ)
                rows = {i: p.row() for i, p in running.values()}
                is_first &= not found and not any(rows.values())
                shown.update(found, rows)
                ended = {f for f, (_, p) in running.items() if p.has_ended()}
                ready = {key.fd for key, _ in selector.select(timeout=1.0)}
                for file in ready | ended:
                    index, process = running[file]
                    if file in ready and process.read():
                        continue
                    selector.unregister(file)
                    del running[file]
                    step = _step_of(process.request, process.end())
                    if step is not None:
                        found[index] = step
    finally:
        for _, process in running.values():
            process.end()
        selector.close()
    return [found[index] for index in sorted(found)]


def _step_of(request: Request, answer: Mapping[str, Any]) -> Any:
    if "step" in answer:
        step = PlannedStep.from_json(answer["step"])
        if step.error is None or not request.is_default:
            return step
        answer = {"error": step.error}
    if request.is_default and request.layout != "replicated":
        # Nobody asked for it. What is wrong with all is said once.
        return None
    return PlannedStep(
        topology=request.topology,
        layout=request.layout,
        num_devices=0,
        num_replicas=0,
        rows=0,
        limit_bytes=None,
        error=str(answer["error"]),
    )


class _Shown:
    """The table on the error output while it is filled, on a terminal."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._live: Any = None

    def __enter__(self) -> "_Shown":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(
        self, found: Mapping[int, Any], running: Mapping[int, Any]
    ) -> None:
        """Shows what is there, and what is compiled.

        Args:
          found: Finished steps, by their places.
          running: Those that are compiled, as far as they are known.
        """
        if self._live is None:
            return
        from rich.console import Group
        from rich.spinner import Spinner

        from keras_strategies.strategy.planning.plan import Plan

        names = [
            f"{self._requests[i].topology} {self._requests[i].layout}"
            for i in running
        ]
        text = f"{len(found)} of {len(self._requests)}: {', '.join(names)}"
        known = {i: row for i, row in running.items() if row is not None}
        known |= found
        steps = tuple(known[i] for i in sorted(known))
        self._live.update(Group(Plan(steps=steps), Spinner("dots", text)))


def requests_of(
    topologies: Sequence[str],
    layouts: Sequence[str] | None,
    layouts_for: Callable[[str], Sequence[str]],
    **common: Any,
) -> list[Request]:
    """The candidates of a command.

    Args:
      topologies: Names of slices.
      layouts: Layouts in words; None: several for each slice.
      layouts_for: The layouts of a slice, if none are named.
      **common: What all requests have.
    """
    pairs = [
        (name, layout)
        for name in topologies
        for layout in (layouts_for(name) if layouts is None else layouts)
    ]
    return [
        Request(
            topology=name,
            layout=layout,
            is_default=layouts is None,
            is_alone=len(pairs) == 1,
            niceness=min(index, _MOST_NICE),
            **common,
        )
        for index, (name, layout) in enumerate(pairs)
    ]
