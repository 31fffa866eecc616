"""Orders of a grid's cells in which each cell's neighbour is one hop away.

References:
  - Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations (JPDC 2009), on all-reduce along a ring.
"""

from collections.abc import Sequence

Cell = tuple[int, ...]


def ring_of_grid(shape: Sequence[int]) -> list[Cell]:
    """Returns all cells of a grid, each one hop from the one before it.

    The last cell is one hop from the first too, except where no such ring
    exists: on a line, which a torus closes by its own link, and where the
    number of cells is odd.

    Args:
      shape: The grid's size in each dimension, all at least one.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    even = [dim for dim in dims if shape[dim] % 2 == 0]
    if even:
        # Rows there and back come out even in this dimension.
        dims.remove(even[-1])
        dims.append(even[-1])
    cells = []
    for short in _wind([shape[dim] for dim in dims]):
        cell = [0] * len(shape)
        for dim, position in zip(dims, short, strict=True):
            cell[dim] = position
        cells.append(tuple(cell))
    return cells


def count_hops(a: Cell, b: Cell, torus: Sequence[int] | None = None) -> int:
    """Returns how many links lie between two cells.

    Args:
      a: A cell.
      b: Another one.
      torus: The grid's shape if a link joins the ends of every line of it;
        None if there are no such links.
    """
    distances = [abs(p - q) for p, q in zip(a, b, strict=True)]
    if torus is not None:
        sizes = zip(distances, torus, strict=True)
        distances = [min(hops, size - hops) for hops, size in sizes]
    return sum(distances)


def count_ring_hops(
    cells: Sequence[Cell], torus: Sequence[int] | None = None
) -> int:
    """Returns the hops once round a ring; see `count_hops`."""
    following = [*cells[1:], *cells[:1]]
    return sum(
        count_hops(a, b, torus) for a, b in zip(cells, following, strict=True)
    )


def paths_through_block(
    shape: Sequence[int],
) -> dict[Cell, dict[Cell, list[Cell]]]:
    """Returns, for each entry and exit of a block, a path over all its cells.

    Exits that no path reaches from an entry are left out. Tries all paths:
    for blocks of a few cells, as the chips of one host are.
    """
    ring = ring_of_grid(shape)
    return {entry: _paths_from([entry], set(ring)) for entry in sorted(ring)}


def _wind(sizes: Sequence[int]) -> list[Cell]:
    """The cells of a grid whose last dimension is even if any is."""
    if not sizes:
        return [()]
    rows = range(sizes[-1])
    if len(sizes) == 1:
        return [(row,) for row in rows]
    line = _wind(sizes[:-1])
    if len(rows) % 2:
        return [
            (*cell, row)
            for row in rows
            for cell in (line if row % 2 == 0 else reversed(line))
        ]
    # The first cell of every row is left for the way back.
    first, rest = line[0], line[1:]
    ring = [(*first, 0)]
    for row in rows:
        there = rest if row % 2 == 0 else reversed(rest)
        ring += [(*cell, row) for cell in there]
    return ring + [(*first, row) for row in reversed(rows[1:])]


def _paths_from(path: list[Cell], cells: set[Cell]) -> dict[Cell, list[Cell]]:
    if len(path) == len(cells):
        return {path[-1]: path}
    found: dict[Cell, list[Cell]] = {}
    for cell in sorted(cells.difference(path)):
        if count_hops(path[-1], cell) == 1:
            for end, whole in _paths_from([*path, cell], cells).items():
                found.setdefault(end, whole)
    return found
