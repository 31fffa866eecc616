"""The report of two processes names the one that is slower."""

import json

import pytest

from tests.multi_process.reports import SLOW_S, STEPS
from tests.support.jobs import values_of_each

pytestmark = pytest.mark.multi_process

ROOM = "multi_process.reports"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A directory, and what the functions return in the two processes."""
    directory = tmp_path_factory.mktemp("job")
    calls = [(f"{ROOM}:slow_input", directory), (f"{ROOM}:slow_callback",)]
    return directory, values_of_each(2, *calls, devices=1)


@pytest.mark.slow
def test_slow_input_of_one_process_is_named(job):
    directory, ((chief, other), _) = job
    figures = chief["figures"]
    found = figures["processes"]
    assert found["count"] == 2
    assert found["slowest"] == 1
    assert found["extra_ms"] > SLOW_S * 500
    assert "waits for input on process 1: " in figures["advice"]
    # Both wait, but only one for its own rows.
    assert figures["shares"]["input"] > 0.3
    assert other["figures"]["shares"]["input"] > 0.3
    # Only the chief prints and writes.
    assert " ".join(figures["advice"].split()) in " ".join(
        chief["printed"].split()
    )
    assert other["printed"] == ""
    written = json.loads((directory / "run_report.json").read_text())
    assert written["starts"][0]["figures"] == figures
    assert written["num_steps"] == STEPS


@pytest.mark.slow
def test_a_slow_callback_of_one_process_is_named(job):
    _, (_, (chief, _)) = job
    found = chief["figures"]["processes"]
    assert found["slowest"] == 1
    assert found["extra_ms"] > SLOW_S * 500
    assert "waits for process 1, which spends" in chief["figures"]["advice"]
