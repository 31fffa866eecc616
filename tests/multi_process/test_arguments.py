"""What fit is given, on two processes: the numbers of one."""

import numpy as np
import pytest

from tests.multi_process import arguments
from tests.support.jobs import values_of
from tests.support.plain_keras import mirrored

pytestmark = pytest.mark.multi_process

TARGET = "multi_process.arguments:run"


def check_files(told):
    _, on_files, on_rows = told["by_file"]["told"]
    np.testing.assert_allclose(on_files, on_rows, rtol=1e-5)


# By default test_fits.py has one of them.
# Keras 3.15.1 also warns if a generator of unknown length ends.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.slow
def test_arguments_of_fit_mean_what_they_do_on_one_process():
    options = {"uses": ["tensorflow"], "timeout_s": 500}
    both = values_of(TARGET, 2, None, **options)
    one = arguments.run(None, mirrored(4))
    one.pop("shuffled")
    orders = [told.pop("shuffled")["told"] for told in both]
    arguments.check_equal(one, both)
    check_files(both[0])
    # Each row once, in whatever order, though the random states differed.
    for name in orders[0]:
        rows = orders[0][name] + orders[1][name]
        assert sorted(rows) == list(range(24)), name
        assert orders[0][name] != list(range(12)), name
