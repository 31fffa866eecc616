"""Arrays as a dataset of their rows."""

import abc
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._core.batches import num_rows
from keras_strategies._types import Tree
from keras_strategies.data.source import (
    Cut,
    Part,
    Source,
    rows_checksum,
    rows_to_checksum,
)
from keras_strategies.data.source_summary import Reading, Summary
from keras_strategies.data.sources.mapped_arrays import let_go


class NumpyDataset:
    """Arrays as a dataset of their rows; `batch` makes it one of batches.

    Args:
      arrays: A nest of arrays; lists in it are stacked to arrays.
      batch_size: Rows of a batch; None yields single rows.
      drop_remainder: Whether a short last batch is left out.

    Attributes:
      arrays: The nest of arrays.
      batch_size: Rows of a batch; None if it yields rows.
    """

    def __init__(
        self,
        arrays: Tree,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        self.arrays: Tree = jax.tree.map(
            np.asarray, arrays, is_leaf=lambda leaf: isinstance(leaf, list)
        )
        self._rows = num_rows(self.arrays)
        self.batch_size = batch_size
        self._drop_remainder = drop_remainder

    def batch(
        self, batch_size: int, drop_remainder: bool = False
    ) -> "NumpyDataset":
        """The same rows in batches.

        Args:
          batch_size: Rows of a global batch.
          drop_remainder: Whether a short last batch is left out.

        Raises:
          ValueError: not a positive number.
        """
        if batch_size < 1:
            raise ValueError(
                "A batch has at least one row. Received: "
                f"batch_size={batch_size}. Pass a positive number."
            )
        return NumpyDataset(self.arrays, batch_size, drop_remainder)

    def __len__(self) -> int:
        """Number of batches, or of rows."""
        whole, rest = divmod(self._rows, self.batch_size or 1)
        return whole + (rest > 0 and not self._drop_remainder)

    def __iter__(self) -> Iterator[Tree]:
        """Yields batches, or rows."""
        size = self.batch_size
        for index in range(len(self)):
            part = index
            if size is not None:
                part = slice(index * size, (index + 1) * size)
            yield jax.tree.map(operator.itemgetter(part), self.arrays)


class IndexedSource(Source):
    """Data of which any row can be read.

    Args:
      num_rows: Number of rows.
      batch_size: Rows of a global batch.
      num_batches: Number of batches.
    """

    is_planned = True

    def __init__(
        self, num_rows: int, batch_size: int, num_batches: int
    ) -> None:
        self.batch_size = batch_size
        self.num_batches = num_batches
        self._num_rows = num_rows
        self._firsts = range(0, num_batches * batch_size, batch_size)

    @abc.abstractmethod
    def rows_at(self, indices: slice | np.ndarray) -> Tree:
        """A nest of arrays of some rows.

        Args:
          indices: The numbers of the rows.
        """

    def facts(self) -> dict[str, Any]:
        """See `Source.facts`."""
        return {"number of rows": self._num_rows, **super().facts()}

    def summary(self) -> Summary:
        """See `Source.summary`."""
        return dataclasses.replace(
            super().summary(), reading=Reading.ROWS, num_rows=self._num_rows
        )

    @property
    def checksum(self) -> int:
        """See `Source.checksum`."""
        rows = rows_to_checksum(self._num_rows)
        batch = self.rows_at(np.array(rows, int))
        return rows_checksum(batch, range(len(rows)))

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        order = None if self.order is None else self.order.of(epoch)
        for first in self._firsts[start:]:
            rows = min(self._firsts.step, self._num_rows - first)
            begin, end = cut(rows)
            indices = slice(first + begin, first + end)
            data = self.rows_at(indices if order is None else order[indices])
            yield Part(data=data, rows=rows)


class RowsSource(IndexedSource):
    """A batched `NumpyDataset`.

    Args:
      dataset: The dataset.

    Raises:
      ValueError: it yields single rows.
    """

    kind = "a dataset of arrays"

    def __init__(self, dataset: NumpyDataset) -> None:
        if dataset.batch_size is None:
            raise ValueError(
                "A dataset yields global batches. Received: a dataset of "
                "single rows. Call `.batch(global_batch_size)` first."
            )
        self._arrays = dataset.arrays
        super().__init__(
            num_rows(self._arrays), dataset.batch_size, len(dataset)
        )

    def rows_at(self, indices: slice | np.ndarray) -> Tree:
        """See `IndexedSource.rows_at`."""
        return jax.tree.map(operator.itemgetter(indices), self._arrays)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        for part in super().read(epoch, start, cut):
            yield part
            for array in jax.tree.leaves(self._arrays):
                let_go(array)
