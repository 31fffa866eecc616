"""Arrays as a dataset of their rows."""

import abc
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.cluster.checks import check_number
from keras_strategies.data.source import (
    Cut,
    Part,
    Reading,
    Source,
    Summary,
    rows_checksum,
    rows_to_checksum,
)
from keras_strategies.data.sources.files import let_go
from keras_strategies.spmd.batches import num_rows


class NumpyDataset:
    """A dataset that yields the rows of arrays, or batches of these rows.

    A dataset without a batch size yields single rows; its method `batch`
    returns a dataset that yields batches.

    Args:
      arrays: A nest of arrays; lists in it are converted to arrays.
      batch_size: Number of rows in a batch; None to yield single rows.
      drop_remainder: Whether to drop the last batch if it has fewer rows.

    Attributes:
      arrays: The nest of arrays.
      batch_size: Number of rows in a batch; None if the dataset yields single
        rows.
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
        """Returns a dataset of the same rows in batches.

        Args:
          batch_size: Number of rows in a global batch.
          drop_remainder: Whether to drop the last batch if it has fewer rows.

        Raises:
          ValueError: if `batch_size` is not positive.
        """
        fix = "Pass a number of rows."
        check_number(
            "`batch_size`", batch_size, fix, minimum=1, is_optional=False
        )
        return NumpyDataset(self.arrays, batch_size, drop_remainder)

    def __len__(self) -> int:
        """Returns the number of batches, or of rows if `batch_size` is None."""
        whole, rest = divmod(self._rows, self.batch_size or 1)
        return whole + (rest > 0 and not self._drop_remainder)

    def __iter__(self) -> Iterator[Tree]:
        """Yields batches, or single rows if `batch_size` is None."""
        size = self.batch_size
        for index in range(len(self)):
            part = index
            if size is not None:
                part = slice(index * size, (index + 1) * size)
            yield jax.tree.map(operator.itemgetter(part), self.arrays)


class IndexedSource(Source):
    """The base class of sources whose rows can be read by index.

    Args:
      num_rows: Number of rows in the data.
      batch_size: Number of rows in a global batch.
      num_batches: Number of batches in an epoch.
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
        """Returns the rows at the given indices, as a nest of arrays.

        Args:
          indices: The indices of the rows.
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
        order = None if self.order is None else self.order.compute(epoch)
        for first in self._firsts[start:]:
            rows = min(self._firsts.step, self._num_rows - first)
            begin, end = cut(rows)
            indices = slice(first + begin, first + end)
            data = self.rows_at(indices if order is None else order[indices])
            yield Part(data=data, rows=rows)


class RowsSource(IndexedSource):
    """A source that reads the batches of a `NumpyDataset`.

    Args:
      dataset: The dataset, which must yield batches.

    Raises:
      ValueError: if the dataset yields single rows.
    """

    kind = "a dataset of arrays"

    def __init__(self, dataset: NumpyDataset) -> None:
        if dataset.batch_size is None:
            raise ValueError(
                "A dataset must yield global batches. This dataset yields "
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
