"""Fits of two processes that start once for these tests: one's numbers."""

import numpy as np
import pytest

from tests.multi_process import accumulation, arguments
from tests.multi_process.own_sources import Rows, compiled
from tests.support.jobs import values_of_each
from tests.support.numbers import assert_all_close
from tests.support.plain_keras import mirrored

pytestmark = pytest.mark.multi_process

OWN_ROWS = ["off_py_dataset"]
CALLS = {
    "sums": ("accumulation:steps", False),
    "sums that are read": ("accumulation:steps", True),
    "own source": ("own_sources:fitted", False),
    "own source of own rows": ("own_sources:fitted", True),
    "own rows": ("arguments:run", OWN_ROWS),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By name: what a function returns in each of two processes."""
    calls = CALLS | {
        "managed": ("managed:save_and_restore", tmp_path_factory.mktemp("run"))
    }
    values = values_of_each(
        2,
        *((f"multi_process.{name}", *args) for name, *args in calls.values()),
    )
    return dict(zip(calls, values, strict=True))


@pytest.mark.parametrize("reads", [False, True])
def test_accumulated_gradients_are_summed_once_per_update(found, reads):
    first, second = found["sums that are read" if reads else "sums"]
    assert first[0] == second[0]
    # The kinds of programs: whether gradients are summed once per update.
    assert first[2] == second[2] == [not reads]
    alone = accumulation.steps(reads, mirrored(4))
    assert_all_close(first[0], alone[0])
    if reads:
        # The chief reads sums, although the other process reads nothing.
        assert second[1] == []
        assert_all_close(first[1], alone[1])
        assert np.abs(np.ravel(first[1][0])).max() > 0


@pytest.mark.parametrize("is_process_local", [False, True])
def test_a_source_of_ones_own_trains_as_on_one_process(found, is_process_local):
    name = "own source of own rows" if is_process_local else "own source"
    first, second = found[name]
    assert first["weights"] == second["weights"]
    assert first["loss"] == second["loss"]
    assert first["steps"] == 6
    # Each reads its own rows alone, in both epochs; and once more its rows of
    # the first batch, for their shapes.
    peeked = 2 * 8 if is_process_local else 8
    assert first["read"] + second["read"] == 2 * 22 + peeked
    if is_process_local:
        return  # The rows of a step are other ones.
    plain, rows = compiled(), Rows()
    for epoch in range(2):
        for part in rows.read(epoch, 0, lambda count: (0, count)):
            plain.train_on_batch(*part.data)
    assert_all_close(plain.get_weights(), first["weights"])


def test_own_rows_train_as_the_same_batches_on_one_process(found):
    one = arguments.run(OWN_ROWS, mirrored(4))
    arguments.check_equal(one, found["own rows"])


def test_variables_made_outside_of_the_scope_are_saved(found):
    for value in found["managed"]:
        # The chief's values, in both.
        assert value == {
            "step": 2,
            "epoch": 13,
            "factor": [0.0, 1.0, 2.0],
            "is_same": True,
            "is_local": True,
        }
