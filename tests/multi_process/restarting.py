"""Starts the fit of restarted.py by `launch --max-restarts`, and checks it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from keras_strategies.reporting.document import load_report
from tests.support.commands import WITHOUT_PACKAGES

ROOT = pathlib.Path(__file__).parents[2]
TIME_LIMIT_S = 1800
CACHE = "programs"
"""The directory beside the job's for compiled programs, of two jobs."""


def launch(
    directory, count, *options, epochs, kind="dropout", script="restarted"
):
    """Starts a job, or starts it again; its lines are appended to a log."""
    directory.mkdir(exist_ok=True)
    # The cache of the tests must not get programs of killed processes.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ["XDG_CACHE_HOME"] = str(directory.parent / CACHE)
    environ[WITHOUT_PACKAGES] = "sklearn tensorflow"
    words = [sys.executable, "-m", "keras_strategies.cli", "launch"]
    words += ["--processes", str(count), *options]
    words += ["-m", f"tests.multi_process.{script}", str(directory)]
    with open(directory / "log", "ab") as log:
        return subprocess.Popen(
            [*words, str(epochs), kind],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environ,
        )


def finish(process, directory):
    """Waits for the end; returns the weights."""
    try:
        code = process.wait(TIME_LIMIT_S)
    finally:
        process.terminate()
        process.wait()
    log = (directory / "log").read_text()
    assert code == 0, log[-5000:]
    return np.load(directory / "weights.npy"), log


def find_children(process):
    """Returns the ids of a job's processes, the chief's first."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        return [int(pid) for pid in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # The job has ended.
        return []


def kill(process, choose):
    """Kills one process of the job; returns whether there was one."""
    pids = find_children(process)
    if pids:
        os.kill(choose(pids), signal.SIGKILL)
    return len(pids) > 0


def count_steps(directory, name="steps"):
    """Counts the steps that were computed, again or not."""
    steps = directory / name
    return len(steps.read_text().split()) if steps.exists() else 0


def wait_for_steps(directory, number, process):
    """Waits until the job has computed a number of steps, again or not."""
    while process.poll() is None and count_steps(directory) < number:
        time.sleep(0.02)


def wait_for_checkpoint(directory, process):
    """Waits until the job has saved a checkpoint, in a thread, and said so."""
    checkpoints = directory / "checkpoints"
    while process.poll() is None and not any(checkpoints.glob("*/manifest*")):
        time.sleep(0.02)
    wait_for_steps(directory, count_steps(directory) + 10, process)


def check_report(directory, num_steps):
    """Checks that the report has an entry for each start of the run.

    It may have been written up to 30 seconds before a process was killed.
    """
    report = load_report(directory / "checkpoints")
    assert report["num_steps"] == num_steps
    starts = report["starts"]
    assert len(starts) == report["num_starts"]
    assert starts[-1]["last_step"] == num_steps
    begun = count_steps(directory, "begun") - num_steps
    assert 0 <= report["num_repeated"] <= begun
