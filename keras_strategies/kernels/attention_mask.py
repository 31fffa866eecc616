"""The mask of attention, as the parts that a kernel can use."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Array

LANES = 128
"""Sequence lengths are padded to multiples of this number of a TPU's lanes."""

Limits = tuple[int | None, int | None]
"""See `AttentionMask.left` and `AttentionMask.right`."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AttentionMask:
    """The keys that each query attends to; without arguments, all keys.

    The kernel skips blocks of scores that `left` and `right` exclude. Only
    `scores` is read from memory for each pair of a query and a key.

    Attributes:
      left: The largest distance to an earlier key; None for no limit.
      right: The largest distance to a later key: 0 in causal attention; None
        for no limit.
      queries: True for the queries that attend to any key, of shape (batch,
        T); None for all.
      keys: True for the keys that are attended to, of shape (batch, S); None
        for all.
      query_segments: Integers of shape (batch, T): each query attends only to
        keys with the same one; None if there are no segments.
      key_segments: The integers of the keys, of shape (batch, S), or None.
      scores: True for the scores to use, of shape (batch or 1, heads or 1, T,
        S); None for all.
    """

    left: int | None = None
    right: int | None = None
    queries: Array | None = None
    keys: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    scores: Array | None = None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """The arrays of the mask, `scores` as the last one."""
        return tuple(getattr(self, name) for name in _ARRAYS)

    def with_arrays(self, arrays: Sequence[Array | None]) -> "AttentionMask":
        """Returns a copy with other arrays, in the order of `arrays`."""
        changes: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=True))
        return dataclasses.replace(self, **changes)


_ARRAYS = ("queries", "keys", "query_segments", "key_segments", "scores")
NUM_BY_POSITION = 4
"""The number of a mask's first arrays, which have entries for positions."""


def read_mask(array: Array | None, query: Array, key: Array) -> AttentionMask:
    """Returns the mask of an array of shape (batch or 1, heads or 1, T, S)."""
    if array is None:
        return AttentionMask()
    array = jnp.asarray(array, bool)
    shape = (*array.shape[:2], query.shape[1], key.shape[1])
    return AttentionMask(scores=jnp.broadcast_to(array, shape))


def make_causal(mask: AttentionMask, query: Array, key: Array) -> AttentionMask:
    """Returns a mask that also excludes the keys after each query."""
    if mask.scores is None:
        return dataclasses.replace(mask, right=0)
    is_earlier = jnp.tril(jnp.ones((query.shape[1], key.shape[1]), bool))
    return dataclasses.replace(mask, scores=mask.scores & is_earlier)


def pad_mask(
    mask: AttentionMask, queries: tuple[int, ...], keys: tuple[int, ...]
) -> AttentionMask:
    """Returns a mask that excludes the keys by which lengths are padded.

    The padded lengths are multiples of `LANES`.

    Args:
      mask: The mask.
      queries: The numbers of rows and of queries.
      keys: The numbers of rows and of keys.
    """
    more_queries, more_keys = (-n % LANES for _, n in (queries, keys))
    if not more_queries and not more_keys:
        return mask
    # Without it, the last queries attend to keys of the padding.
    is_needed = more_keys and not (mask.right == 0 and queries == keys)
    if is_needed and mask.keys is None and mask.scores is None:
        mask = dataclasses.replace(mask, keys=jnp.ones(keys, bool))
    widths = [
        *(((0, 0), (0, n)) for n in (more_queries, more_keys) * 2),
        ((0, 0), (0, 0), (0, more_queries), (0, more_keys)),
    ]
    padded = [
        None if array is None else jnp.pad(array, width)
        for array, width in zip(mask.arrays, widths, strict=True)
    ]
    return mask.with_arrays(padded)


def find_queries_with_keys(
    mask: AttentionMask, queries: int, keys: int
) -> Array | None:
    """Returns which queries attend to any key; None if all of them do.

    Returns:
      A boolean array that broadcasts to (batch, T, heads, 1).
    """
    if mask.scores is not None:
        return jnp.swapaxes(mask.scores.any(-1, keepdims=True), 1, 2)
    first, end = _find_ranges(mask, queries, keys)
    has_keys = None if (end > first).all() else (end > first)[None]
    if mask.query_segments is not None and mask.key_segments is not None:
        places = jnp.arange(keys)
        used = (first[:, None] <= places) & (places < end[:, None])
        used &= mask.query_segments[:, :, None] == mask.key_segments[:, None]
        if mask.keys is not None:
            used &= mask.keys[:, None]
        has_keys = used.any(-1)
    elif mask.keys is not None:
        counts = jnp.cumsum(mask.keys, axis=1, dtype="int32")
        counts = jnp.pad(counts, [(0, 0), (1, 0)])
        has_keys = counts[:, end] > counts[:, first]
    if mask.queries is not None:
        has_keys = mask.queries if has_keys is None else has_keys & mask.queries
    return None if has_keys is None else has_keys[:, :, None, None]


def count_pairs(mask: AttentionMask, queries: int, keys: int) -> int:
    """Returns the number of pairs of a query and a key within the limits."""
    first, end = _find_ranges(mask, queries, keys)
    return int((end - first).clip(0).sum())


def _find_ranges(
    mask: AttentionMask, queries: int, keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first key of each query, and the end of its keys."""
    places = np.arange(queries)
    first = 0 * places if mask.left is None else places - mask.left
    end = 0 * places + keys if mask.right is None else places + mask.right + 1
    return np.clip(first, 0, keys), np.clip(end, 0, keys)
