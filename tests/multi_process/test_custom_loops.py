"""run, reduce, gather and datasets on several processes."""

import numpy as np
import pytest

from tests.multi_process.custom_loops import train
from tests.support.jobs import run_and_list_results, values_of
from tests.support.plain_keras import assert_same, mirrored

pytestmark = pytest.mark.multi_process

TARGET = "multi_process.custom_loops"


def test_a_loop_equals_one_process(two_processes):
    # 21 rows in batches of 8: 5 rows are left, and a replica without any.
    several = [told["trained"] for told, _ in two_processes]
    compare(several, 21, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "count", "devices"),
    [(16, 2, 2), (21, 2, 1), (21, 3, 2), (3, 3, 2), (21, 3, 1)],
)
def test_loops_equal_one_process(rows, count, devices):
    several = values_of(f"{TARGET}:train", count, rows, devices=devices)
    compare(several, rows, devices * count)


def compare(several, rows, devices):
    one = train(rows, mirrored(devices))
    assert one["seen"] == 2 * rows
    for value in several:
        assert_same(one, value)


@pytest.fixture(scope="module")
def two_processes():
    """What two processes found that start once for several tests, and what
    they wrote."""
    results = run_and_list_results(2, (f"{TARGET}:everything",))
    return [(*result.value, result.output) for result in results]


def test_values_are_those_of_all_processes(two_processes):
    first, second = (told["values"] for told, _ in two_processes)
    assert first["sum"] == second["sum"] == 2 * (1 + 2 + 3 + 4)
    assert (first["local"], second["local"]) == ([2, 4], [6, 8])
    # Process 0 has three batches of two rows, process 1 five: [2, 2 | 2, 2],
    # [2, 0 | 2, 2], [0, 0 | 2, 0].
    assert first["steps"] == second["steps"]
    expected = [[0, 1, 2, 3, 1, 2, 3, 4], [4, 5, 5, 6, 7, 8], [9, 10]]
    np.testing.assert_array_equal(
        sum(first["steps"], []), np.concatenate(expected)
    )
    assert [len(s) for s in first["steps"]] == list(map(len, expected))
    # Each of the four copies starts with 1, and is added 2.
    assert first["copies"] == second["copies"] == 12
    assert "single process" in first["refused"]


def test_a_step_sends_one_buffer(two_processes):
    """Gradients, metrics, moving statistics and the loss, all together."""
    for told, _ in two_processes:
        assert told["sent"] == {"fit": [1], "run": [1]}


def test_values_of_other_shapes_are_named_in_all(two_processes):
    first, second = (told["values"] for told, _ in two_processes)
    assert first["unequal"][0] == second["unequal"][0]
    assert "ValueError: If there are several processes" in first["unequal"][0]
    assert "float64[2]" in first["unequal"][0]
    assert "float64[3]" in first["unequal"][0]
    told = [one["unequal"][1] for one in (first, second)]
    assert all("no such value" in text for text in told)


def test_the_chief_alone_shows_progress_and_keeps_outputs(two_processes):
    of_chief, other_output = (output for _, output in two_processes)
    assert "Epoch 1/2" in of_chief
    assert "Epoch" not in other_output
    assert "step" not in other_output
    first, second = (told["on_chief"] for told, _ in two_processes)
    assert first["shape"] == [13, 1]
    assert second["shape"] == [0, 1]
    # Their random states differ; the initial weights are the chief's.
    for name in ("weights", "logs", "trained"):
        assert first[name] == second[name]
