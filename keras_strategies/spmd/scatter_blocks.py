"""Blocks of matrices of which XLA for TPUs makes real reduce-scatters."""

import itertools
import math

# The number of rows of a block must be a multiple of the rows of a TPU tile,
# and its number of columns a multiple of the columns of eight tiles.
_TILE_ROWS = 8
_TILE_COLUMNS = 1024

# XLA made reduce-scatters of all blocks that were tried whose numbers of tiles
# have an odd factor of at most 33, and of none with one of 63 or more.
_MAX_ODD = 33

# From this number of entries on, matrices are padded to blocks, up to a factor.
_LARGE = 2**26
_MAX_PADDING = 1.125

# From this number of entries on, shards of columns may be exchanged.
_WIDE = 2**24


def find_block(
    shape: tuple[int, ...], dim: int, count: int
) -> tuple[int, int] | None:
    """Returns the shape of the blocks of which a reduce-scatter sums one.

    For some matrices, XLA for TPUs (libtpu 0.0.42) implements a reduce-scatter
    along the rows as an all-reduce of the full matrix, unless the matrix is
    reshaped into blocks of full tiles whose numbers have no large odd factors.
    Large matrices are padded to such blocks. For other matrices it uses an
    all-reduce only if they are reshaped (docs/sharding.md).

    Args:
      shape: The shape of the array.
      dim: The dimension that is scattered.
      count: The number of replicas.

    Returns:
      The rows and columns of a block; None if the array is not reshaped.
    """
    if len(shape) != 2 or dim != 0 or 0 in shape:
        return None
    rows, columns = shape[0] // count, shape[1]
    sizes = (rows, _TILE_ROWS), (columns, _TILE_COLUMNS)
    tiles = [-(-size // tile) for size, tile in sizes]
    if all(map(_is_even, tiles)) or math.prod(shape) < _LARGE:
        is_of_tiles = not any(size % tile for size, tile in sizes)
        return (rows, columns) if is_of_tiles else None
    more = [next(filter(_is_even, itertools.count(n))) for n in tiles]
    block = more[0] * _TILE_ROWS, more[1] * _TILE_COLUMNS
    is_much = math.prod(block) > _MAX_PADDING * rows * columns
    return None if is_much else block


def scatters_rows(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Returns whether a scatter along columns is one along rows, exchanged.

    XLA for TPUs (libtpu 0.0.42) implements a reduce-scatter along the columns
    as an all-reduce for some numbers of columns on a replica, such as 36, but
    for no power of two.
    """
    is_wide = len(shape) == 2 and dim == 1 and math.prod(shape) >= _WIDE
    columns = shape[-1] // count
    is_odd = columns & (columns - 1) != 0
    return is_wide and is_odd and shape[0] % (_TILE_ROWS * count) == 0


def _is_even(tiles: int) -> bool:
    """Returns whether XLA divides a number of tiles among a chip's links."""
    return tiles // (tiles & -tiles) <= _MAX_ODD
