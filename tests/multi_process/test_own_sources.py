"""A `ks.data.Source` of one's own on two processes: the numbers of one."""

import pytest

from tests.multi_process.own_sources import Rows, compiled
from tests.support.jobs import values_of_each
from tests.support.numbers import assert_all_close


@pytest.fixture(scope="module")
def found():
    """What the two processes found with each kind of source."""
    target = "multi_process.own_sources:fitted"
    kinds = (False, True)
    values = values_of_each(2, *((target, kind) for kind in kinds))
    return dict(zip(kinds, values, strict=True))


@pytest.mark.parametrize("is_process_local", [False, True])
def test_two_processes_train_as_one(found, is_process_local):
    first, second = found[is_process_local]
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
