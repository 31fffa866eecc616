"""The example runs, in one process and as chief, worker and evaluator."""

import os
import pathlib

import pytest

from tests.support.commands import python

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "estimator_digits.py")

pytestmark = pytest.mark.slow


def run(*words):
    done = python(
        *words,
        env=os.environ
        | {
            "COLUMNS": "100",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        encoding="utf-8",
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_second_run_goes_on(tmp_path):
    pytest.importorskip("sklearn")
    text = run(EXAMPLE, "--model-dir", str(tmp_path))
    assert "went on from step  │ 200" in text
    assert "global step        │ 400" in text


def test_chief_worker_and_evaluator(tmp_path):
    pytest.importorskip("sklearn")
    launch = ["-m", "keras_strategies.cli", "launch", "--processes", "2"]
    for steps in (200, 300):
        text = run(
            *launch,
            "--evaluator",
            EXAMPLE,
            "--model-dir",
            str(tmp_path),
            "--max-steps",
            str(steps),
        )
        assert f"[evaluator] │ global step        │ {steps}" in text
    kept = {path.name for path in tmp_path.iterdir() if path.name.isdigit()}
    assert kept == {"100", "200", "300"}
