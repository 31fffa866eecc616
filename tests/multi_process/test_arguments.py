"""What fit is given, on two processes: the numbers of one."""

import jax
import numpy as np
import pytest

from keras_strategies.testing import run_processes

TARGET = "tests.multi_process.arguments:run"


def run(names):
    (one,) = run_processes(
        TARGET, 1, args=(names,), devices_per_process=4, timeout_s=400
    )
    both = run_processes(TARGET, 2, args=(names,), timeout_s=500)
    return one.value, [result.value for result in both]


def check_equal(one, both):
    for told in both:
        assert told == both[0]
        assert told.keys() == one.keys()
        for name, expected in one.items():
            jax.tree.map(
                lambda a, e, name=name: np.testing.assert_allclose(
                    a, e, rtol=1e-5, atol=1e-5, err_msg=name
                ),
                told[name],
                expected,
            )


def check_files(told):
    _, on_files, on_rows = told["by_file"]["told"]
    np.testing.assert_allclose(on_files, on_rows, rtol=1e-5)


def test_own_rows_train_as_the_same_batches_on_one_process():
    check_equal(*run(["off_py_dataset"]))


@pytest.mark.slow
def test_arguments_of_fit_mean_what_they_do_on_one_process():
    one, both = run(None)
    one.pop("shuffled")
    orders = [told.pop("shuffled")["told"] for told in both]
    check_equal(one, both)
    check_files(both[0])
    # Each row once, in whatever order, though the random states differed.
    for name in orders[0]:
        rows = orders[0][name] + orders[1][name]
        assert sorted(rows) == list(range(24)), name
        assert orders[0][name] != list(range(12)), name
