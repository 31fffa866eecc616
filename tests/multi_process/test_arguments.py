"""What fit is given, on two processes: the numbers of one."""

import numpy as np
import pytest

from tests.multi_process import arguments
from tests.support.jobs import values_of
from tests.support.plain_keras import assert_same, mirrored

TARGET = "multi_process.arguments:run"


def run(names, uses=()):
    both = values_of(TARGET, 2, names, uses=uses, timeout_s=500)
    return arguments.run(names, mirrored(4)), both


def check_equal(one, both):
    for told in both:
        assert told == both[0]
        assert_same(one, told)


def check_files(told):
    _, on_files, on_rows = told["by_file"]["told"]
    np.testing.assert_allclose(on_files, on_rows, rtol=1e-5)


def test_own_rows_train_as_the_same_batches_on_one_process():
    check_equal(*run(["off_py_dataset"]))


@pytest.mark.slow
def test_arguments_of_fit_mean_what_they_do_on_one_process():
    one, both = run(None, ["tensorflow"])
    one.pop("shuffled")
    orders = [told.pop("shuffled")["told"] for told in both]
    check_equal(one, both)
    check_files(both[0])
    # Each row once, in whatever order, though the random states differed.
    for name in orders[0]:
        rows = orders[0][name] + orders[1][name]
        assert sorted(rows) == list(range(24)), name
        assert orders[0][name] != list(range(12)), name
