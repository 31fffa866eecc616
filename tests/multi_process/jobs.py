"""Starts a job of scripts, does something to one, and tells how all end."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.testing import processes

_POLL_S = 0.02
_START_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How one process ended.

    Attributes:
      code: Its exit status; None for one that had to be killed.
      seconds: From the fault to its end.
      output: What it wrote.
    """

    code: int | None
    seconds: float
    output: str

    @property
    def last_lines(self):
        return "\n".join(self.output.rstrip().splitlines()[-5:])

    @property
    def last_step(self):
        return int(re.findall(r"^step (\d+)", self.output, re.M)[-1])


def run_job(
    directory,
    told,
    *,
    count=2,
    devices=1,
    signal_to=None,
    limit_s=60,
    env=(),
    pipes=False,
):
    """Runs `tests.multi_process.faults` in some processes.

    Args:
      directory: For the logs.
      told: What each process is told, besides its place.
      count: How many processes.
      devices: Virtual devices of each.
      signal_to: (signal, process) to send when all have done some steps; None
        for a fault that a process does itself, and says.
      limit_s: How long to wait for all ends after the fault.
      env: More variables of the environment.
      pipes: Whether each has a launcher's pipe.

    Returns:
      How each ended.
    """
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    logs = [pathlib.Path(directory) / f"{index}.log" for index in range(count)]
    variables = processes._make_environment(devices, dict(env))
    running, ends = [], []
    try:
        for index, log in enumerate(logs):
            words = told | {"place": [count, index, address]}
            child, end = _start(words, log, variables, pipes)
            running.append(child)
            ends.append(end)
        at = _fault(running, logs, told, signal_to)
        if pipes:
            _launch(running, ends, at + limit_s)
        stopped = _stopped(running, signal_to)
        seconds = _wait(running, at, limit_s, but=stopped)
    finally:
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            child.wait()
        for end in filter(None, ends):
            with contextlib.suppress(OSError):
                os.close(end)
    return [
        Ended(
            code=None if index not in seconds else child.returncode,
            seconds=seconds.get(index, float("inf")),
            output=log.read_text("utf-8", errors="replace"),
        )
        for index, (child, log) in enumerate(zip(running, logs, strict=True))
    ]


def _start(words, log, variables, pipes):
    read = write = None
    if pipes:
        read, write = os.pipe()
        variables = variables | {"KERAS_STRATEGIES_LAUNCHER_FD": str(read)}
    with open(log, "wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.multi_process.faults"]
            + [json.dumps(words)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=() if read is None else (read,),
        )
    if read is not None:
        os.close(read)
    return child, write


def _fault(running, logs, told, signal_to):
    """Waits for the fault, or makes it; returns when it was."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        texts = [log.read_text("utf-8", errors="replace") for log in logs]
        if signal_to is None:
            found = re.search(r"^fault at ([\d.]+)", "\n".join(texts), re.M)
            if found:
                return float(found[1])
        elif all("\nstep 5 " in text for text in texts):
            sent, process = signal_to
            running[process].send_signal(sent)
            return time.time()
        if any(child.poll() is not None for child in running):
            break
        time.sleep(_POLL_S)
    shown = "\n---\n".join(text[-3000:] for text in texts)
    raise AssertionError(f"no fault in {told}:\n{shown}")


def _launch(running, ends, until):
    """Does what a launcher does: tells all of the first that dies."""
    while time.time() < until:
        for index, child in enumerate(running):
            if child.poll() is not None:
                name = signal.Signals(-child.returncode).name
                for end in ends:
                    with contextlib.suppress(OSError):
                        os.write(
                            end,
                            f"process {index} was killed by {name}\n".encode(),
                        )
                return
        time.sleep(_POLL_S)


def _stopped(running, signal_to):
    if signal_to is not None and signal_to[0] == signal.SIGSTOP:
        return {signal_to[1]}
    return set()


def _wait(running, at, limit_s, but):
    seconds = {}
    while time.time() < at + limit_s:
        for index, child in enumerate(running):
            if index not in seconds and child.poll() is not None:
                seconds[index] = time.time() - at
        if len(seconds) + len(but) >= len(running):
            break
        time.sleep(_POLL_S)
    return seconds
