"""Accumulated gradients are summed once per update, between processes too."""

import numpy as np
import pytest

from tests.multi_process.accumulation import steps
from tests.support.jobs import values_of_each
from tests.support.numbers import assert_all_close
from tests.support.plain_keras import mirrored


@pytest.fixture(scope="module")
def found():
    """What two processes found without and with reading the sums."""
    target = "multi_process.accumulation:steps"
    return values_of_each(2, (target, False), (target, True))


@pytest.mark.parametrize("reads", [False, True])
def test_numbers_are_those_of_one_process(found, reads):
    first, second = found[reads]
    assert first[0] == second[0]
    # The kinds of programs: whether gradients are summed once per update.
    assert first[2] == second[2] == [not reads]
    alone = steps(reads, mirrored(4))
    assert_all_close(first[0], alone[0])
    if reads:
        # The chief reads sums, although the other process reads nothing.
        assert second[1] == []
        assert_all_close(first[1], alone[1])
        assert np.abs(np.ravel(first[1][0])).max() > 0
