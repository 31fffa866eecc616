"""Thirty faults, most of them during a write, leave nothing behind.

Each kills a worker, the chief or the launcher. After a launcher, the same
command is started again.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import time

import numpy as np
import pytest
from jax._src import compilation_cache

from tests.multi_process.restarting import (
    CACHE,
    check_report,
    count_steps,
    find_children,
    finish,
    launch,
    wait_for_steps,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

COUNT, EPOCHS, SEED = 2, 45, 11
EACH = 10
VICTIMS = ("worker", "chief", "launcher")
AT_START = ("cache", "start")
# Seconds until all processes have ended after one was killed.
END_S = 15.0
START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A process of a job is killed.

    Attributes:
      place: "save" and "cache" are those of `faulty.Stop`; "start" is some
        seconds after a start, and "steps" after some steps.
      victim: One of `VICTIMS`.
      number: See `faulty.Stop`; for "steps", the number of steps.
      share: See `faulty.Stop`; otherwise, a part of the waiting time.
    """

    place: str
    victim: str
    number: int
    share: float


def draw(chance):
    """Draws the faults; not three in a row before a step, which end a job."""
    places = ["save", "cache"] * EACH + ["steps"] * (EACH - 3) + ["start"] * 3
    maximum = {"save": 60, "cache": 6, "steps": 30, "start": 1}
    while True:
        chance.shuffle(places)
        if not re.search("S{3}", "".join("sS"[p in AT_START] for p in places)):
            break
    return [
        Fault(
            place=place,
            victim=chance.choice(VICTIMS),
            number=chance.randrange(maximum[place]) + 8 * (place == "steps"),
            # All of the file's bytes, none or some.
            share=min(max(chance.uniform(-0.3, 1.3), 0.0), 1.0),
        )
        for place in places
    ]


class Job:
    """A job that is killed.

    Args:
      directory: The directory of the job, which the processes' command lines
        contain.
    """

    def __init__(self, directory):
        self.directory = directory
        self.start()

    def start(self):
        options = ("--max-restarts", "99")
        self.launcher = launch(
            self.directory, COUNT, *options, epochs=EPOCHS, script="faulty"
        )

    def start_again(self):
        if self.launcher.poll() is not None:
            self.start()

    def arm(self, fault):
        """Prepares a fault, while no process of the job runs."""
        if fault.place == "cache":
            # Only programs that are not in the cache are written.
            forget_programs(self.directory.parent)
        if fault.place in ("save", "cache"):
            stop = dataclasses.asdict(fault)
            del stop["victim"]
            new = self.directory / "fault.new"
            new.write_text(json.dumps(stop))
            new.rename(self.directory / "fault.json")

    def strike(self, fault):
        """Waits for the place of a fault; kills its victim and no other."""
        self.wait_for(fault)
        pids = find_children(self.launcher)
        victim = {
            "worker": pids[-1:],
            "chief": pids[:1],
            "launcher": [self.launcher.pid],
        }[fault.victim]
        assert self.launcher.poll() is None, "the job has ended"
        os.kill(*victim, signal.SIGKILL)
        if fault.place in ("save", "cache"):
            pid, where = (self.directory / "reached").read_text().split(" ", 1)
            assert int(pid) == pids[0]
            print(f"Stopped in {where}")
            (self.directory / "fault.json").unlink()
            (self.directory / "reached").unlink()
        wait_until(lambda: not any(map(is_running, pids)), END_S)
        if fault.victim == "launcher":
            assert self.launcher.wait() == -signal.SIGKILL
            assert find_processes(self.directory) == []

    def wait_for(self, fault):
        if fault.place == "steps":
            number = count_steps(self.directory) + fault.number
            wait_for_steps(self.directory, number, self.launcher)
            time.sleep(0.1 * fault.share)
            return
        wait_until(lambda: len(find_children(self.launcher)) == COUNT, START_S)
        if fault.place == "start":
            time.sleep(8.0 * fault.share)
        else:
            reached = self.directory / "reached"
            wait_until(
                lambda: reached.exists() or self.launcher.poll() is not None,
                START_S,
            )


def is_running(pid):
    """Returns whether a process has neither ended nor is a zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def find_processes(directory):
    """Finds the processes with a directory in their command line."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory) in path.read_text(errors="replace"):
                pids.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


def list_programs(directory, ending="-cache"):
    return sorted((directory / CACHE).glob(f"keras_strategies/jax-*/*{ending}"))


def forget_programs(directory):
    """Deletes those programs that are complete."""
    for program in list_programs(directory):
        time = program.with_name(f"{program.name[:-6]}-atime")
        if time.exists():
            program.unlink()
            time.unlink()


def check_cache(directory):
    """Checks that all programs are complete and have a time of use."""
    programs = list_programs(directory)
    expected = {".lockfile"}
    for program in programs:
        key = program.name.removesuffix("-cache")
        expected |= {f"{key}-cache", f"{key}-atime"}
        compilation_cache.decompress_executable(program.read_bytes())
    assert {path.name for path in list_programs(directory, "")} == expected
    assert programs


def check_checkpoints(directory):
    """Checks that the directory has good checkpoints, and nothing besides."""
    kept = {path.name for path in directory.iterdir()}
    steps = {name for name in kept if name.isdecimal()}
    assert len(steps) == 5
    assert kept - steps == {".lock", "run_report.json"}
    assert all((directory / step / "manifest.json").exists() for step in steps)


def test_thirty_faults_at_random_places(tmp_path):
    directory = tmp_path / "killed"
    whole = launch(tmp_path / "whole", COUNT, epochs=EPOCHS)
    expected, _ = finish(whole, tmp_path / "whole")
    faults = draw(random.Random(SEED))
    job = Job(directory)
    try:
        for fault in faults:
            since = time.monotonic()
            job.arm(fault)
            job.start_again()
            job.strike(fault)
            print(f"{time.monotonic() - since:.1f} s: {fault}", flush=True)
        job.start_again()
        found, log = finish(job.launcher, directory)
    except BaseException:
        print((directory / "log").read_text()[-5000:])
        raise
    finally:
        job.launcher.kill()
        job.launcher.wait()
    np.testing.assert_array_equal(found, expected)
    check_report(directory, EPOCHS * 10)
    check_checkpoints(directory / "checkpoints")
    assert find_processes(directory) == []
    assert "ompilation cache" not in log
    check_cache(tmp_path)
    # A run after all faults caches its programs.
    forget_programs(tmp_path)
    finish(launch(tmp_path / "after", COUNT, epochs=1), tmp_path / "after")
    check_cache(tmp_path)
