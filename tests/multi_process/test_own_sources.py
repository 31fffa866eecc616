"""A `ks.data.Source` of one's own on two processes: the numbers of one."""

import numpy as np
import pytest

from keras_strategies.testing import run_processes
from tests.multi_process.own_sources import Rows, compiled


@pytest.mark.parametrize("is_process_local", [False, True])
def test_two_processes_train_as_one(is_process_local):
    results = run_processes(
        "tests.multi_process.own_sources:fitted", 2, args=[is_process_local]
    )
    first, second = (result.value for result in results)
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
    for expected, got in zip(
        plain.get_weights(), first["weights"], strict=True
    ):
        np.testing.assert_allclose(expected, got, rtol=1e-5, atol=1e-6)
