"""Accumulated gradients are summed once per update, between processes too."""

import numpy as np
import pytest

from tests.support.jobs import values_of
from tests.support.numbers import assert_all_close


@pytest.mark.parametrize("reads", [False, True])
def test_numbers_are_those_of_one_process(reads):
    steps = "multi_process.accumulation:steps"
    first, second = values_of(steps, 2, reads)
    assert first[0] == second[0]
    # The kinds of programs: whether gradients are summed once per update.
    assert first[2] == second[2] == [not reads]
    (alone,) = values_of(steps, 1, reads, devices=4)
    assert_all_close(first[0], alone[0])
    if reads:
        # The chief reads sums, although the other process reads nothing.
        assert second[1] == []
        assert_all_close(first[1], alone[1])
        assert np.abs(np.ravel(first[1][0])).max() > 0
