"""fit, evaluate and predict on several processes: the numbers of one."""

import pytest

from tests.multi_process import scenarios
from tests.support.jobs import values_of, values_of_each
from tests.support.optional import without_torch
from tests.support.plain_keras import assert_same

TARGET = "multi_process.scenarios:loops"
CASES = [(16, 8, 1), (20, 8, 1), (30, 8, 1), (5, 8, 1), (30, 8, 3), (9, 1, 1)]
NAMES = without_torch(
    ["arrays", "PyDataset", "generator", "tf.data", "grain", "torch"]
)


FEW = ["arrays", "generator", "tf.data"], CASES[2:3]


@pytest.fixture(scope="module")
def found():
    """What the loops and a model with states are in each of two processes."""
    loops = "multi_process.scenarios:loops", *FEW
    stateful = ("multi_process.scenarios:stateful",)
    return values_of_each(2, loops, stateful, devices=1)


def test_loops_equal_those_of_one_process(found):
    compare(values_of(TARGET, 1, *FEW, devices=2), found[0], *FEW)


def test_a_model_is_built_for_the_rows_of_all_processes(found):
    """One whose states are as many as a batch's rows takes no others."""
    values = found[1]
    plain = scenarios.fit_stateful(
        scenarios.build_stateful(), from_tf_data=False
    )
    for value in values:
        assert_same([plain, plain], value)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), (3, 2), (2, 1)])
def test_loops_equal_those_of_one_process_for_all_sizes(num_processes, devices):
    args = NAMES, CASES
    alone = values_of(TARGET, 1, *args, devices=devices * num_processes)
    several = values_of(TARGET, num_processes, *args, devices=devices)
    compare(alone, several, *args)


def compare(alone, several, names, cases):
    (one,) = alone
    assert len(one) == len(names) * len(cases)
    for value in several:
        assert_same(one, value)
        assert value == several[0]
