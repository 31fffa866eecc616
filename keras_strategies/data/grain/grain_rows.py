"""Rows of grain's `MapDataset`s, and the facts of their pipelines.

Private attributes of grain show what a transformation does. Without them
(tests/data/grain/test_grain_data.py notices) rows are read one by one, or
entire batches.
"""

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_strategies._types import Dataset, Tree

# Rows that are read at once, and so are in memory before they are mapped.
_NUM_AT_ONCE = 32
_OF_GRAIN = "grain._src.python.dataset."


class Stacked(NamedTuple):
    """Rows of a `MapDataset` that are stacked to batches.

    Attributes:
      rows: The dataset of rows.
      batch_size: Number of rows of a batch.
      many: The same dataset, over sources that read many rows at once; None if
        grain cannot.
    """

    rows: Any
    batch_size: int
    many: Any

    def read(self, indices: Sequence[int]) -> list[Tree]:
        """Returns some rows.

        grain's statistics cost 10 to 20 us for each row that is read by itself;
        for rows that are read together they are recorded once.
        """
        if self.many is None:
            return [self.rows[index] for index in indices]
        read: list[Tree] = []
        for start in range(0, len(indices), _NUM_AT_ONCE):
            read += self.many._getitems(indices[start : start + _NUM_AT_ONCE])
        return read


def find_stacked_rows(dataset: Dataset) -> Stacked | None:
    """Returns the rows below a `.batch(...)` that only stacks them, or None."""
    if type(dataset).__name__ != "BatchMapDataset":
        return None
    from grain._src.python.dataset.transformations import batch

    if getattr(dataset, "_batch_fn", None) is not batch.make_batch:
        return None
    size = getattr(dataset, "_batch_size", None)
    if not isinstance(size, int):
        return None
    rows = dataset.parents[0]
    return Stacked(rows=rows, batch_size=size, many=_copy_for_many(rows))


def compute_checksum(dataset: Dataset) -> int:
    """Computes a checksum of the transformations' names, lengths and seeds."""
    facts = [
        (type(inner).__name__, len(inner), getattr(inner, "_seed", None))
        for inner in iterate_pipeline(dataset)
    ]
    return zlib.crc32(repr(facts).encode())


def iterate_pipeline(dataset: Dataset) -> Iterator[Any]:
    """Iterates over a dataset and everything that it is made from."""
    waiting = [dataset]
    for inner in waiting:
        yield inner
        waiting.extend(getattr(inner, "parents", ()))


def _copy_for_many(dataset: Dataset) -> Dataset | None:
    """Returns a copy of a pipeline that reads many rows at once, or None."""
    kind = type(dataset)
    if not kind.__module__.startswith(_OF_GRAIN) or not _reads_many(kind):
        return None
    clone = copy.copy(dataset)
    if kind.__name__ == "SourceMapDataset":
        if not _is_grain_source(dataset._source):
            clone._source = _ManyRows(dataset._source)
        # Metrics would be recorded for each row if Prometheus is installed.
        clone._record_metrics = False
        return clone
    parents = [_copy_for_many(parent) for parent in dataset.parents]
    if not parents or None in parents:
        return None
    clone._parents = parents
    # The statistics refer to the original's parents.
    vars(clone).pop("_stats", None)
    return clone


def _is_grain_source(source: object) -> bool:
    """Returns whether a source is grain's and reads many rows by itself."""
    module = type(source).__module__
    return module.startswith("grain.") and hasattr(source, "_getitems")


def _reads_many(kind: type) -> bool:
    """Returns whether a class of grain overrides reading many rows."""
    from grain import MapDataset

    rows = getattr(MapDataset, "_getitems", None)
    return rows is not None and getattr(kind, "_getitems", rows) is not rows


class _ManyRows:
    """A source that can be asked for many rows at once."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Tree:
        return self._source[index]

    def _getitems(self, indices: Sequence[int]) -> list[Tree]:
        # Copies, because a source may reuse one array for all rows. Read one by
        # one, each row would be mapped before the next is read.
        return [jax.tree.map(_copy, self._source[index]) for index in indices]


def _copy(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
