"""How a batch's rows are divided over replicas."""

import pytest

from keras_strategies.spmd.rows import rotated_rows, rows_of_replicas

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("rows", "batch_size", "replicas", "expected"),
    [
        (8, 8, 2, (4, 4)),
        (6, 8, 2, (4, 2)),
        (9, 9, 4, (3, 2, 2, 2)),
        (5, 9, 4, (3, 2, 0, 0)),
        (1, 8, 4, (1, 0, 0, 0)),
        (3, 3, 8, (1, 1, 1, 0, 0, 0, 0, 0)),
        (10, 8, 2, (5, 5)),
        (7, 7, 1, (7,)),
    ],
)
def test_the_first_replicas_are_filled_in_order(
    rows, batch_size, replicas, expected
):
    counts = rows_of_replicas(rows, batch_size, replicas)
    assert counts == expected
    assert sum(counts) == rows


@pytest.mark.parametrize(
    ("batch_size", "replicas", "processes", "steps"),
    [
        # As tf's RebatchDataset cuts the batches of each worker.
        (3, 2, 2, [(2, 1), (1, 2), (2, 1)]),
        (1, 2, 2, [(1, 0), (0, 1), (1, 0)]),
        (4, 2, 2, [(2, 2), (2, 2)]),
        (5, 4, 2, [(2, 1, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1)]),
        (5, 3, 3, [(2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)]),
        (5, 4, 1, [(2, 1, 1, 1), (2, 1, 1, 1)]),
    ],
)
def test_places_move_on_by_a_process(batch_size, replicas, processes, steps):
    for step, expected in enumerate(steps):
        found = rotated_rows(step, batch_size, replicas, processes)
        assert found == expected
        assert sum(found) == batch_size
