"""Numbers of rows that replicas have, and arguments cut to them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.replica_map import replica_id
from keras_strategies._core.values import cut
from keras_strategies._types import Array

Variant = tuple[int | tuple[int, ...], ...]
"""Rows of each uneven argument; shapes of those that differ beyond rows."""


def with_rows(
    variant: Variant, is_uneven: list[bool], leaves: list[Any]
) -> list[Any]:
    """The arguments with the rows of one variant; see `call_unevenly`."""
    sizes = iter(variant)

    def own(leaf: Array) -> Array:
        size = next(sizes)
        if isinstance(size, int):
            return leaf[:, :size]
        return cut(leaf, (1, *size))

    return [
        own(leaf) if uneven else leaf
        for leaf, uneven in zip(leaves, is_uneven, strict=True)
    ]


def variants_of(rows: Sequence[Variant]) -> list[Variant]:
    """The different numbers of rows, each once; the largest first."""
    return sorted(set(rows), reverse=True)


def shares_of(rows: Sequence[Variant]) -> list[float] | None:
    """Each replica's weight in averages: none without rows.

    Args:
      rows: Each replica's numbers of rows, of all uneven arguments.

    Returns:
      The weights, or None where all have the same.
    """
    has_rows = [any(map(_rows_in, variant)) for variant in rows]
    if all(has_rows) or not any(has_rows):
        return None
    return [is_full / sum(has_rows) for is_full in has_rows]


def own_share(rows: Sequence[Variant], axis: Axis) -> jax.Array | None:
    """This replica's weight in averages, a traced number; see `shares_of`."""
    shares = shares_of(rows)
    return None if shares is None else jnp.array(shares)[replica_id(axis)]


def rows_of_all(
    own: Variant, rows: Sequence[Variant]
) -> dict[int, set[tuple[int, ...]]]:
    """By a replica's own number of rows, those of all replicas.

    Args:
      own: The replica's numbers of rows, of all uneven arguments.
      rows: Those of each replica.
    """
    columns: dict[int, set[tuple[int, ...]]] = {}
    for size, sizes in zip(own, zip(*rows, strict=True), strict=True):
        column = tuple(map(_rows_in, sizes))
        columns.setdefault(_rows_in(size), set()).add(column)
    return columns


def _rows_in(size: int | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]
