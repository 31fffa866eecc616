"""Rows of grain's `MapDataset`s, and the facts of their pipelines.

Private attributes of grain show what a transformation does. Without them
(tests/data/grain/test_grain_data.py sees it) rows are read one by one, or whole
batches.
"""

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_strategies._types import Dataset, Tree

# Rows that are read at once: as many are in memory before they are mapped.
_NUM_AT_ONCE = 32
_OF_GRAIN = "grain._src.python.dataset."


class Stacked(NamedTuple):
    """Rows of a `MapDataset` that are stacked to batches.

    Attributes:
      rows: The dataset of them.
      batch_size: Number of rows of a batch.
      many: The same, from sources that give many rows at once; None where
        grain has no such way.
    """

    rows: Any
    batch_size: int
    many: Any

    def read(self, indices: Sequence[int]) -> list[Tree]:
        """Some rows.

        Read one by one, each costs 10 to 20 us for grain's statistics, which
        are not kept otherwise.
        """
        if self.many is None:
            return [self.rows[index] for index in indices]
        read: list[Tree] = []
        for start in range(0, len(indices), _NUM_AT_ONCE):
            read += self.many._getitems(indices[start : start + _NUM_AT_ONCE])
        return read


def stacked_rows(dataset: Dataset) -> Stacked | None:
    """The rows below a `.batch(...)` that only stacks them."""
    if type(dataset).__name__ != "BatchMapDataset":
        return None
    from grain._src.python.dataset.transformations import batch

    if getattr(dataset, "_batch_fn", None) is not batch.make_batch:
        return None
    size = getattr(dataset, "_batch_size", None)
    if not isinstance(size, int):
        return None
    rows = dataset.parents[0]
    return Stacked(rows=rows, batch_size=size, many=_of_many(rows))


def checksum_of(dataset: Dataset) -> int:
    """A checksum of the transformations' names, lengths and seeds."""
    facts = [
        (type(inner).__name__, len(inner), getattr(inner, "_seed", None))
        for inner in with_parents(dataset)
    ]
    return zlib.crc32(repr(facts).encode())


def with_parents(dataset: Dataset) -> Iterator[Any]:
    """A dataset and all that it is made of."""
    waiting = [dataset]
    for inner in waiting:
        yield inner
        waiting.extend(getattr(inner, "parents", ()))


def _of_many(dataset: Dataset) -> Dataset | None:
    """A copy of a pipeline whose sources give many rows at once, or None."""
    kind = type(dataset)
    if not kind.__module__.startswith(_OF_GRAIN) or not _has_many(kind):
        return None
    made = copy.copy(dataset)
    if kind.__name__ == "SourceMapDataset":
        if not _is_grains(dataset._source):
            made._source = _Rows(dataset._source)
        # For each row again, where Prometheus is installed.
        made._record_metrics = False
        return made
    parents = [_of_many(parent) for parent in dataset.parents]
    if not parents or None in parents:
        return None
    made._parents = parents
    # They know the original's parents.
    vars(made).pop("_stats", None)
    return made


def _is_grains(source: object) -> bool:
    """Whether a source is grain's own, and gives many rows by itself."""
    module = type(source).__module__
    return module.startswith("grain.") and hasattr(source, "_getitems")


def _has_many(kind: type) -> bool:
    """Whether a class of grain's gives many rows in a way of its own."""
    from grain import MapDataset

    rows = getattr(MapDataset, "_getitems", None)
    return rows is not None and getattr(kind, "_getitems", rows) is not rows


class _Rows:
    """A source that is asked for many rows at once."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Tree:
        return self._source[index]

    def _getitems(self, indices: Sequence[int]) -> list[Tree]:
        # Copies: read one by one, each would be mapped before the next one is
        # read, maybe into the same array.
        return [jax.tree.map(_copy, self._source[index]) for index in indices]


def _copy(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
