"""Orders of grids in which neighbours are one hop apart."""

import itertools
import math

import pytest

from keras_strategies.tpu.rings import (
    count_hops,
    count_ring_hops,
    paths_through_block,
    ring_of_grid,
)

pytestmark = pytest.mark.quick

SHAPES = [
    *itertools.product([1, 2, 3, 4], repeat=3),
    (5, 6),
    (6, 5),
    (7,),
    (),
    (16, 16, 1),
    (8, 8, 16),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cell_is_visited_once_hop_by_hop(shape):
    ring = ring_of_grid(shape)
    assert sorted(ring) == list(itertools.product(*map(range, shape)))
    hops = [count_hops(a, b) for a, b in itertools.pairwise(ring)]
    assert set(hops) <= {1}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ring_closes_where_the_grid_permits(shape):
    ring = ring_of_grid(shape)
    is_line = sum(size > 1 for size in shape) < 2
    if not is_line and math.prod(shape) % 2 == 0:
        assert count_ring_hops(ring) == len(ring)
    if is_line and len(ring) > 2:
        assert count_ring_hops(ring, torus=shape) == len(ring)


def test_a_torus_has_a_link_from_end_to_end():
    assert count_hops((0, 1, 0), (15, 1, 3)) == 18
    assert count_hops((0, 1, 0), (15, 1, 3), torus=(16, 4, 4)) == 2


@pytest.mark.parametrize("block", [(1, 1, 1), (2, 2, 1), (2, 4, 1), (2, 2, 2)])
def test_paths_go_through_every_cell_of_a_block(block):
    cells = set(ring_of_grid(block))
    paths = paths_through_block(block)
    assert set(paths) == cells
    for entry, by_exit in paths.items():
        assert by_exit
        for end, path in by_exit.items():
            assert (path[0], path[-1]) == (entry, end)
            assert set(path) == cells
            assert all(
                count_hops(a, b) == 1 for a, b in itertools.pairwise(path)
            )
