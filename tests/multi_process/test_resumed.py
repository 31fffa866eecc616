"""Jobs that are killed, and go on.

All of it, in about ten minutes: python -m pytest -m "slow or not slow"
tests/multi_process/test_resumed.py
"""

import json
import os
import pathlib

import pytest

from tests.multi_process import resumed
from tests.multi_process.test_through_launch import launch

pytestmark = pytest.mark.multi_process

# Compiling is most of the time.
FLAGS = " ".join(
    flag
    for flag in os.environ["XLA_FLAGS"].split()
    if "device_count" not in flag
)
NAMES = list(resumed.SOURCES)
slow = pytest.mark.slow


def run(directory, processes, devices, *, sources=NAMES, parts=({},), **told):
    """Runs a job; returns how it ended, and what the fits of each part gave."""
    directory.mkdir(exist_ok=True)
    words = {"directory": str(directory), "sources": sources, "seed": 1} | told
    words["parts"] = [{"directory": str(directory)} | part for part in parts]
    ended = launch(processes, devices, "resumed", json.dumps(words), FLAGS)
    found = [outcomes(pathlib.Path(p["directory"])) for p in words["parts"]]
    if "point" not in told:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert all(set(outcome) == set(sources) for outcome in found)
    return ended, *found


def outcomes(directory):
    return {
        path.parent.name: json.loads(path.read_text())
        for path in directory.glob("*/outcome.json")
    }


def assert_same(ours, theirs):
    for name, outcome in ours.items():
        for part, value in theirs[name].items():
            assert outcome[part] == value, (name, part)


def check_whole(whole):
    for outcome in whole.values():
        assert outcome["epochs"] == list(range(resumed.EPOCHS))
        assert outcome["history"]["once"] == [resumed.ROWS] * resumed.EPOCHS
        rates = outcome["history"]["learning_rate"]
        assert rates[-1] < rates[0]


def kill(directory, processes, devices, point, order):
    """Runs a job that is killed while it trains with the last source."""
    ended, done = run(directory, processes, devices, sources=order, point=point)
    said = ended.stdout + ended.stderr
    assert not done, said
    assert "was killed by SIGKILL" in said
    for name in order[:-1]:
        assert f"{name} was interrupted" in said
    partial = list(directory.glob(f"{order[-1]}/kept/*orbax-checkpoint-tmp*"))
    assert partial or point != "while arrays are written"


@pytest.mark.slow
def test_a_job_killed_while_it_saves_goes_on(tmp_path):
    kill(tmp_path, 1, 4, "while arrays are written", ["numpy"])
    other = {"directory": str(tmp_path / "whole"), "seed": 1}
    parts = [{"seed": 7}, other]
    _, ours, whole = run(tmp_path, 1, 4, sources=["numpy"], parts=parts)
    check_whole(whole)
    assert_same(ours, whole)


@slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 1)])
def test_a_job_killed_anywhere_goes_on(processes, devices, tmp_path):
    _, whole = run(tmp_path / "whole", processes, devices)
    check_whole(whole)
    for number, point in enumerate(resumed.POINTS):
        directory = tmp_path / str(number)
        # Another one is the last, which is killed.
        turn = number % len(NAMES)
        order = NAMES[turn:] + NAMES[:turn]
        kill(directory, processes, devices, point, order)
        _, ours = run(
            directory, processes, devices, sources=order, seed=7 + number
        )
        assert_same(ours, whole)
        print(f"{processes} x {devices}, {point}: {len(ours)} equal")
