"""A job that is started again whenever it ends, until it is done."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.multi_process import resumed, test_resumed
from tests.multi_process.test_through_launch import ROOT

pytestmark = pytest.mark.multi_process

EVERY, EPOCHS, LIMIT_S = 10, 10, 120
PROBLEMS = [
    # (Signal, process, after which step, the launcher's exit code.)
    ("SIGKILL", 1, 17, 137),
    ("SIGKILL", 0, 37, 137),
    ("SIGSTOP", 1, 57, 71),
    ("SIGTERM", 1, 73, 75),
]


def start(directory, seed):
    told = {
        "directory": str(directory),
        "sources": ["numpy"],
        "seed": seed,
        "epochs": EPOCHS,
        "every": EVERY,
        "slow_s": 0.1,
    }
    words = ["-m", "keras_strategies.cli", "launch", "--processes", "2"]
    words += ["--devices-per-process", "1", "-m", "tests.multi_process.resumed"]
    with open(directory / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, *words, json.dumps(told)],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": test_resumed.FLAGS},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def said(directory, process):
    """(What, step, process's id) of each line."""
    path = directory / "numpy" / f"steps.{process}"
    text = path.read_text() if path.exists() else ""
    lines = re.findall(r"^(.*) (\d+) of (\d+)$", text, re.M)
    return [(what, int(step), int(pid)) for what, step, pid in lines]


def wait_for(directory, process, step, job):
    """Returns the id of a process that has done a step."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and job.poll() is None:
        *_, last = [("", 0, 0), *said(directory, process)]
        if last[1] >= step:
            return last[2]
        time.sleep(0.01)
    raise AssertionError((directory / "log").read_text()[-4000:])


def steps_of_last_process(directory, process):
    lines = said(directory, process)
    return [line for line in lines if line[2] == lines[-1][2]]


@pytest.mark.slow
def test_a_supervised_run_is_the_one_that_nothing_happened_to(tmp_path):
    directory = tmp_path / "problems"
    directory.mkdir()
    stopped, job = None, None
    try:
        # The first process draws what the run's order comes from, seeded as
        # the run that it is compared with; what others would draw is no matter.
        for seed, (sent, process, step, code) in enumerate(PROBLEMS, start=1):
            job = start(directory, seed)
            pid = wait_for(directory, process, step, job)
            os.kill(pid, signal.Signals[sent])
            stopped = pid if sent == "SIGSTOP" else None
            ended = job.wait(LIMIT_S)
            log = (directory / "log").read_text()
            last = [steps_of_last_process(directory, p) for p in (0, 1)]
            print(sent, process, ended, [lines[-1] for lines in last])
            if stopped is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGKILL)
            done = max(lines[-1][1] for lines in last)
            newest = max(
                int(path.parent.name)
                for path in directory.glob("numpy/kept/*/manifest.json")
            )
            assert ended == code, log
            if sent == "SIGTERM":
                # The same step everywhere, which is kept.
                assert {lines[-1][1] for lines in last} == {newest}, log
                told = re.findall("stopped by SIGTERM .* exit code 75", log)
                assert len(told) == 2, log
            else:
                assert done - EVERY <= newest <= done, log
        job = start(directory, seed=9)
        assert job.wait(LIMIT_S) == 0, (directory / "log").read_text()
    finally:
        if job is not None and job.poll() is None:
            job.terminate()
            job.wait()
    # It went on, each time, from where it is said to have been.
    begun = [line for line in said(directory, 0) if line[0] == "goes on"]
    assert len({pid for *_, pid in begun}) == len(PROBLEMS)
    _, whole = test_resumed.run(
        tmp_path / "whole", 2, 1, sources=["numpy"], epochs=EPOCHS, every=EVERY
    )
    test_resumed.assert_same(test_resumed.outcomes(directory), whole)


@pytest.mark.slow
def test_a_job_goes_on_with_other_numbers_of_processes(tmp_path):
    told = {"model": "elastic", "sources": ["numpy", "tf.data"]}
    _, whole = test_resumed.run(tmp_path / "whole", 2, 2, **told)
    first = tmp_path / "first"
    order = told | {"sources": ["tf.data", "numpy"]}
    test_resumed.run(first, 2, 2, point="in an epoch", **order)
    for processes, devices in [(1, 1), (1, 4), (2, 1), (3, 1)]:
        here = tmp_path / f"{processes}x{devices}"
        shutil.copytree(first, here)
        _, ours = test_resumed.run(
            here, processes, devices, **told | {"seed": 7}
        )
        for name, outcome in ours.items():
            history = outcome["history"]
            assert history["once"] == [resumed.ROWS] * resumed.EPOCHS
            for part in ("loss", "val_loss"):
                expected = whole[name]["history"][part]
                assert history[part] == pytest.approx(expected, rel=1e-5), name
            worst = max(
                abs(a / b - 1)
                for a, b in zip(
                    history["loss"], whole[name]["history"]["loss"], strict=True
                )
            )
            print(f"2 x 2, then {processes} x {devices}, {name}: {worst:.1e}")
        log = (here / "numpy" / "log.csv").read_text()
        assert len(log.splitlines()) == 1 + resumed.EPOCHS
