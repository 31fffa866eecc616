"""Reading single rows of grain's `MapDataset`s, and inspecting pipelines.

Private attributes of grain show what a transformation does. If a version of
grain does not have these attributes, rows are read one at a time, or entire
batches are read. tests/data/grain/test_grain_data.py fails in that case.
"""

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_strategies._types import Dataset, Tree

# Number of rows that are read together. They are all in memory at the same time
# before the mapped functions run.
_NUM_AT_ONCE = 32
_OF_GRAIN = "grain._src.python.dataset."


class Stacked(NamedTuple):
    """The rows of a `MapDataset` that stacks them into batches.

    Attributes:
      rows: The dataset of rows.
      batch_size: Number of rows in a batch.
      many: A copy of `rows` that can read many rows in one call; None if grain
        does not support this.
    """

    rows: Any
    batch_size: int
    many: Any

    def read(self, indices: Sequence[int]) -> list[Tree]:
        """Returns the rows at the given indices.

        Each call to grain takes 10 to 20 us to record statistics. To pay this
        only once for many rows, they are read together if possible.
        """
        if self.many is None:
            return [self.rows[index] for index in indices]
        read: list[Tree] = []
        for start in range(0, len(indices), _NUM_AT_ONCE):
            read += self.many._getitems(indices[start : start + _NUM_AT_ONCE])
        return read


def find_stacked_rows(dataset: Dataset) -> Stacked | None:
    """Finds the rows that the last `.batch(...)` of a dataset stacks.

    Returns None if the last transformation is not such a `.batch(...)`.
    """
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
    """Computes a checksum of transformations: names, lengths and seeds."""
    facts = [
        (type(inner).__name__, len(inner), getattr(inner, "_seed", None))
        for inner in iterate_pipeline(dataset)
    ]
    return zlib.crc32(repr(facts).encode())


def iterate_pipeline(dataset: Dataset) -> Iterator[Any]:
    """Yields a dataset and, recursively, the datasets and sources it reads."""
    waiting = [dataset]
    for inner in waiting:
        yield inner
        waiting.extend(getattr(inner, "parents", ()))


def _copy_for_many(dataset: Dataset) -> Dataset | None:
    """Copies a pipeline so that it can read many rows in one call.

    Returns None if grain does not support this.
    """
    kind = type(dataset)
    if not kind.__module__.startswith(_OF_GRAIN) or not _reads_many(kind):
        return None
    clone = copy.copy(dataset)
    if kind.__name__ == "SourceMapDataset":
        if not _is_grain_source(dataset._source):
            clone._source = _ManyRows(dataset._source)
        # Otherwise, if Prometheus is installed, grain records metrics for each
        # row.
        clone._record_metrics = False
        return clone
    parents = [_copy_for_many(parent) for parent in dataset.parents]
    if not parents or None in parents:
        return None
    clone._parents = parents
    # The statistics refer to the parents of the original, not of the copy.
    vars(clone).pop("_stats", None)
    return clone


def _is_grain_source(source: object) -> bool:
    """Returns whether a source comes with grain and can read many rows."""
    module = type(source).__module__
    return module.startswith("grain.") and hasattr(source, "_getitems")


def _reads_many(kind: type) -> bool:
    """Returns whether a class overrides grain's method that reads many rows."""
    from grain import MapDataset

    rows = getattr(MapDataset, "_getitems", None)
    return rows is not None and getattr(kind, "_getitems", rows) is not rows


class _ManyRows:
    """Wraps a source so that many rows can be read in one call."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Tree:
        return self._source[index]

    def _getitems(self, indices: Sequence[int]) -> list[Tree]:
        # Rows are copied, because a source may reuse one array for all rows. If
        # rows were read one at a time, no copies would be needed, since each
        # row would be mapped before the next one is read.
        return [jax.tree.map(_copy, self._source[index]) for index in indices]


def _copy(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
