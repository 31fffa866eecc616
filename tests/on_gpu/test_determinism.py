"""Runs on a GPU that compute the same bits after `enable_determinism`."""

import os

import pytest

from tests.support.commands import python

pytestmark = pytest.mark.on_gpu


def train(*words):
    done = python("-m", "tests.on_gpu.train", *words, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("digest")]
    return line


def test_a_resumed_run_is_equal_bit_for_bit(tmp_path):
    whole = train(3, "--deterministic")
    train(1, tmp_path / "run", "--deterministic")
    assert train(3, tmp_path / "run", "--deterministic") == whole
