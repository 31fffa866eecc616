"""examples/clusters/ray_train.py, with Ray itself on this machine."""

import os
import pathlib
import re

import pytest

from tests.support.commands import python

pytestmark = pytest.mark.ray
SCRIPT = (
    pathlib.Path(__file__).parents[2] / "examples" / "clusters" / "ray_train.py"
)
TIME_LIMIT_S = 400


def trained(directory, *words):
    pytest.importorskip("ray", reason="./run test -m ray")
    done = python(
        SCRIPT,
        "--directory",
        directory,
        *words,
        timeout=TIME_LIMIT_S,
        env=os.environ | {"XLA_FLAGS": ""},
        cwd=directory.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = (directory / "result.txt").read_text()
    assert said in done.stdout
    return said


def test_a_worker_that_is_lost_costs_nothing(tmp_path):
    expected = trained(tmp_path / "whole")
    assert re.match(
        r"2 processes, 2 replicas, epochs \[0, 1, 2, 3, 4\]", expected
    )
    assert trained(tmp_path / "lost", "--lose-a-worker") == expected
    assert (tmp_path / "lost" / "lost").exists()
