"""The search for the most rows that fit."""

import pytest

from keras_strategies.planning.compile.edge import find_edge

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("edge", [0, 1, 2, 7, 14, 100, 11_156, 436_000])
@pytest.mark.parametrize("guess", [0, 1, 13, 100, 9_000, 500_000])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_edge_is_found(edge, guess, is_told):
    tries = []

    def fits(rows):
        tries.append(rows)
        # Steps, as arrays have whole tiles, and what is there without rows.
        needed = 500.0 + 8 * (rows // 8) + 3 * rows
        limit_rows = edge
        return rows <= limit_rows, needed if is_told else None

    limit = 500.0 + 8 * (edge // 8) + 3 * edge
    assert find_edge(guess, limit, fits, 60) == (edge, True)
    assert len(set(tries)) == len(tries)
    if is_told and guess and edge:
        assert len(tries) <= 24


def test_it_ends_where_everything_fits():
    rows, is_seen = find_edge(5, 1e9, lambda rows: (True, 1.0), 24)
    assert rows == 2**24
    assert not is_seen


def test_it_ends_after_so_many_tries():
    def fits(rows):
        return rows <= 1000, None

    rows, is_seen = find_edge(3000, 1.0, fits, 3)
    assert rows <= 1000
    assert not is_seen
