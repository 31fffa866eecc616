"""Variants: the numbers of rows that a replica has of each uneven argument.

Replicas with the same numbers of rows have the same variant, and share its
traced code.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategies._types import Array
from keras_strategies.passes.specs import Axis
from keras_strategies.spmd.replica_map import replica_id
from keras_strategies.spmd.values import cut

Variant = tuple[int | tuple[int, ...], ...]
"""For each uneven argument, its number of rows, or its shape if the replicas'
shapes differ in other dimensions too."""


def cut_to_rows(
    variant: Variant, is_ragged: list[bool], leaves: list[Any]
) -> list[Any]:
    """Cuts padded arguments to a variant's rows; see `call_ragged`."""
    sizes = iter(variant)

    def cut_leaf(leaf: Array) -> Array:
        size = next(sizes)
        if isinstance(size, int):
            return leaf[:, :size]
        return cut(leaf, (1, *size))

    return [
        cut_leaf(leaf) if uneven else leaf
        for leaf, uneven in zip(leaves, is_ragged, strict=True)
    ]


def find_variants(rows: Sequence[Variant]) -> list[Variant]:
    """Returns the distinct variants among the replicas, the largest first."""
    return sorted(set(rows), reverse=True)


def compute_shares(rows: Sequence[Variant]) -> list[float] | None:
    """Computes each replica's weight in averages; 0 for one without rows.

    Args:
      rows: The variant of each replica.

    Returns:
      The weights, or None if all weights are equal.
    """
    has_rows = [any(map(_rows_in, variant)) for variant in rows]
    if all(has_rows) or not any(has_rows):
        return None
    return [is_full / sum(has_rows) for is_full in has_rows]


def compute_local_share(
    rows: Sequence[Variant], axis: Axis
) -> jax.Array | None:
    """Returns this replica's weight in averages; None if all are equal."""
    shares = compute_shares(rows)
    return None if shares is None else jnp.array(shares)[replica_id(axis)]


def group_rows_of_all(
    local: Variant, rows: Sequence[Variant]
) -> dict[int, set[tuple[int, ...]]]:
    """Groups uneven arguments by their numbers of rows on one replica.

    Args:
      local: The replica's variant.
      rows: The variants of all replicas.

    Returns:
      A dict. A key is a number of rows; its value contains, for each argument
      that has this number of rows on the replica, the argument's numbers of
      rows on all replicas.
    """
    columns: dict[int, set[tuple[int, ...]]] = {}
    for size, sizes in zip(local, zip(*rows, strict=True), strict=True):
        column = tuple(map(_rows_in, sizes))
        columns.setdefault(_rows_in(size), set()).add(column)
    return columns


def _rows_in(size: int | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]
