"""Jobs that are killed, and go on.

All of it, in about ten minutes: python -m pytest -m "slow or not slow"
tests/multi_process/test_resumed.py
"""

import json

import pytest

from tests.multi_process import resumed
from tests.multi_process.test_through_launch import launch

NAMES = list(resumed.SOURCES)
KILLED = 128 + 9
slow = pytest.mark.slow


def run(folder, processes, devices, *, sources=NAMES, **told):
    """Runs a job; returns how it ended, and what the sources' fits gave."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*/outcome.json"):
        path.unlink()
    words = {"folder": str(folder), "sources": sources, "seed": 1} | told
    ended = launch(processes, devices, "resumed", json.dumps(words))
    outcomes = {
        path.parent.name: json.loads(path.read_text())
        for path in folder.glob("*/outcome.json")
    }
    if "point" not in told:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert set(outcomes) == set(sources)
    return ended, outcomes


def assert_same(ours, theirs):
    for name, outcome in ours.items():
        for part, value in theirs[name].items():
            assert outcome[part] == value, (name, part)


def check_points(folder, processes, devices, points, sources):
    _, whole = run(folder / "whole", processes, devices, sources=sources)
    for outcome in whole.values():
        assert outcome["epochs"] == list(range(resumed.EPOCHS))
        assert outcome["history"]["once"] == [resumed.ROWS] * resumed.EPOCHS
        rates = outcome["history"]["learning_rate"]
        assert rates[-1] < rates[0]
    for number, point in enumerate(points):
        here = folder / str(number)
        # Another one is the last, which is killed.
        turn = number % len(sources)
        order = sources[turn:] + sources[:turn]
        ended, done = run(here, processes, devices, sources=order, point=point)
        assert ended.returncode not in (0, 1), ended.stdout + ended.stderr
        assert not done
        partial = list(here.glob(f"{order[-1]}/kept/*orbax-checkpoint-tmp*"))
        assert len(partial) == (point == "while arrays are written")
        _, ours = run(here, processes, devices, sources=order, seed=7 + number)
        assert_same(ours, whole)
        print(f"{processes} x {devices}, {point}: {len(ours)} equal")


def test_a_job_killed_while_it_saves_goes_on(tmp_path):
    points = ["while arrays are written"]
    check_points(tmp_path, 1, 4, points, ["numpy"])


@slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 1)])
def test_a_job_killed_anywhere_goes_on(processes, devices, tmp_path):
    check_points(tmp_path, processes, devices, list(resumed.POINTS), NAMES)
