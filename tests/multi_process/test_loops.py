"""fit, evaluate and predict on several processes: the numbers of one."""

import pytest

from tests.multi_process import scenarios
from tests.support.jobs import values_of
from tests.support.optional import without_torch
from tests.support.plain_keras import assert_same

CASES = [(16, 8, 1), (20, 8, 1), (30, 8, 1), (5, 8, 1), (30, 8, 3), (9, 1, 1)]
NAMES = without_torch(
    ["arrays", "PyDataset", "generator", "tf.data", "grain", "torch"]
)


def test_loops_equal_those_of_one_process():
    # tests/examples/test_sharded_files.py has tf.data on two processes.
    check(["arrays", "generator"], CASES[2:3], 2, 1)


def test_a_model_is_built_for_the_rows_of_all_processes():
    """One whose states are as many as a batch's rows takes no others."""
    values = values_of("multi_process.scenarios:stateful", 2, devices=1)
    plain = scenarios.fit_stateful(
        scenarios.build_stateful(), from_tf_data=False
    )
    for value in values:
        assert_same([plain, plain], value)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), (3, 2), (2, 1)])
def test_loops_equal_those_of_one_process_for_all_sizes(num_processes, devices):
    check(NAMES, CASES, num_processes, devices)


def check(names, cases, num_processes, devices):
    target, args = "multi_process.scenarios:loops", (names, cases)
    (one,) = values_of(target, 1, *args, devices=devices * num_processes)
    assert len(one) == len(names) * len(cases)
    several = values_of(target, num_processes, *args, devices=devices)
    for value in several:
        assert_same(one, value)
        assert value == several[0]
