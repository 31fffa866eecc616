"""fit, evaluate and predict on several processes: the numbers of one."""

import jax
import numpy as np
import pytest

from keras_strategies.testing import run_processes
from tests.multi_process import scenarios
from tests.support.optional import without_torch

CASES = [(16, 8, 1), (20, 8, 1), (30, 8, 1), (5, 8, 1), (30, 8, 3), (9, 1, 1)]
NAMES = without_torch(
    ["arrays", "PyDataset", "generator", "tf.data", "grain", "torch"]
)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for key in expected:
        jax.tree.map(
            lambda a, e, key=key: np.testing.assert_allclose(
                a, e, rtol=1e-5, atol=1e-5, err_msg=key
            ),
            actual[key],
            expected[key],
        )


def test_loops_equal_those_of_one_process():
    # tests/examples/test_sharded_files.py has tf.data on two processes.
    check(["arrays", "generator"], CASES[2:3], 2, 1)


def test_a_model_is_built_for_the_rows_of_all_processes():
    """One whose states are as many as a batch's rows takes no others."""
    results = run_processes(
        "tests.multi_process.scenarios:stateful", 2, devices_per_process=1
    )
    plain = scenarios.fit_stateful(
        scenarios.build_stateful(), from_tf_data=False
    )
    for result in results:
        assert_close(dict(enumerate(result.value)), {0: plain, 1: plain})


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), (3, 2), (2, 1)])
def test_loops_equal_those_of_one_process_for_all_sizes(num_processes, devices):
    check(NAMES, CASES, num_processes, devices)


def check(names, cases, num_processes, devices):
    args = (names, cases)
    target = "tests.multi_process.scenarios:loops"
    (one,) = run_processes(
        target,
        1,
        args=args,
        devices_per_process=devices * num_processes,
        timeout_s=300,
    )
    assert len(one.value) == len(names) * len(cases)
    several = run_processes(
        target,
        num_processes,
        args=args,
        devices_per_process=devices,
        timeout_s=400,
    )
    for result in several:
        assert_close(result.value, one.value)
        assert result.value == several[0].value
