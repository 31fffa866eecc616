"""`launch --max-restarts`: killed jobs end with the weights of whole ones."""

import random
import time

import numpy as np
import pytest

from tests.multi_process.restarting import (
    check_report,
    count_steps,
    finish,
    kill,
    launch,
    wait_for_checkpoint,
    wait_for_steps,
)

pytestmark = pytest.mark.multi_process


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_job_ends_with_the_same_weights(tmp_path, count):
    whole = launch(tmp_path / "whole", count, epochs=20)
    expected, _ = finish(whole, tmp_path / "whole")
    job = launch(tmp_path / "killed", count, "--max-restarts", "2", epochs=20)
    try:
        wait_for_steps(tmp_path / "killed", 12, job)
        wait_for_checkpoint(tmp_path / "killed", job)
        assert kill(job, lambda pids: pids[-1])
    finally:
        found, log = finish(job, tmp_path / "killed")
    assert "was killed by SIGKILL; restart 1 of 2 in 1 s." in log
    assert "Resuming from step" not in log  # verbose=0
    np.testing.assert_array_equal(found, expected)
    assert count_steps(tmp_path / "killed") > count_steps(tmp_path / "whole")
    check_report(tmp_path / "killed", 200)


@pytest.mark.slow
def test_twenty_kills_at_random_times(tmp_path):
    whole = launch(tmp_path / "whole", 3, epochs=60)
    expected, _ = finish(whole, tmp_path / "whole")
    job = launch(tmp_path / "killed", 3, "--max-restarts", "40", epochs=60)
    chance = random.Random(5)
    killed = 0
    try:
        while killed < 20 and job.poll() is None:
            # One in five at the start, which takes some seconds.
            if chance.random() < 0.2:
                time.sleep(chance.uniform(0, 15))
            else:
                more = count_steps(tmp_path / "killed") + chance.randint(1, 45)
                wait_for_steps(tmp_path / "killed", more, job)
            killed += kill(job, chance.choice)
    finally:
        found, log = finish(job, tmp_path / "killed")
    assert killed == 20, log[-5000:]
    assert log.count("; restart ") >= 20
    np.testing.assert_array_equal(found, expected)
    check_report(tmp_path / "killed", 600)
