"""Datasets for custom loops: global batches in, values per replica out."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._core.batches import num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.rows import rows_of_replicas
from keras_strategies._core.values import ROWS, PerReplica

Tree = Any


class DistributedDataset:
    """A dataset whose batches are divided over the replicas.

    Made by `Strategy.experimental_distribute_dataset`. May be iterated again
    and again if what it reads may be. Iterating yields nests of `PerReplica`
    (of plain arrays, with one replica).

    Args:
      dataset: An iterable of global batches: nests of arrays whose first
        dimension is the rows.
      mesh: The replicas.
    """

    def __init__(self, dataset: Iterable[Tree], mesh: ReplicaMesh) -> None:
        check_batches(dataset)
        self._dataset = dataset
        self._mesh = mesh

    def __iter__(self) -> "DistributedIterator":
        """Starts at the first batch."""
        return DistributedIterator(host_batches(self._dataset), self._mesh)

    @property
    def element_spec(self) -> Tree:
        """The shapes and dtypes of a global batch, rows left open (None)."""
        batch = next(iter(host_batches(self._dataset)))
        return jax.tree.map(
            lambda leaf: ((None, *leaf.shape[1:]), leaf.dtype), batch
        )


class DistributedIterator:
    """Iterates over the batches of a `DistributedDataset`.

    Args:
      batches: Global batches on the host.
      mesh: The replicas.
    """

    def __init__(self, batches: Iterator[Tree], mesh: ReplicaMesh) -> None:
        self._batches = batches
        self._mesh = mesh
        self._batch_size: int | None = None

    def __iter__(self) -> "DistributedIterator":
        """Goes on where it is."""
        return self

    def __next__(self) -> Tree:
        """The next batch, divided over the replicas."""
        batch = next(self._batches)
        rows = num_rows(batch)
        if self._batch_size is None:
            self._batch_size = rows
        return divided(batch, rows, self._batch_size, self._mesh)

    def get_next(self) -> Tree:
        """The next batch; raises StopIteration at the end, as `next` does."""
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """The next batch, or an empty `Optional` at the end."""
        try:
            return Optional(next(self), is_filled=True)
        except StopIteration:
            return Optional(None, is_filled=False)


class Optional:
    """A batch, or none.

    Args:
      value: The batch.
      is_filled: Whether there is one.
    """

    def __init__(self, value: Tree, *, is_filled: bool) -> None:
        self._value = value
        self._is_filled = is_filled

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return self._is_filled

    def get_value(self) -> Tree:
        """The batch.

        Raises:
          ValueError: there is none: the dataset has ended.
        """
        if not self._is_filled:
            raise ValueError(
                "An empty Optional has no value. Received: `get_value()` at "
                "the end of the dataset. Ask `has_value()` first."
            )
        return self._value


def divided(batch: Tree, rows: int, batch_size: int, mesh: ReplicaMesh) -> Tree:
    """A global batch on the devices, each replica's rows on its own."""
    count = mesh.num_replicas
    if count == 1:
        return jax.device_put(batch, mesh.devices[0])
    shares = rows_of_replicas(rows, batch_size, count)
    if len(set(shares)) == 1:
        return jax.tree.map(lambda leaf: _split(leaf, mesh), batch)
    ends = np.cumsum(shares)

    def parts(leaf: np.ndarray) -> PerReplica:
        return PerReplica(
            [
                jax.device_put(leaf[end - share : end], device)
                for share, end, device in zip(
                    shares, ends, mesh.devices, strict=True
                )
            ]
        )

    return jax.tree.map(parts, batch)


def _split(leaf: np.ndarray, mesh: ReplicaMesh) -> PerReplica:
    array = jax.make_array_from_callback(
        leaf.shape, mesh.split, leaf.__getitem__
    )
    return PerReplica.of(array, ROWS)


def host_batches(dataset: Any) -> Iterator[Tree]:
    """The batches of a dataset as nests of numpy arrays."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset):
        return dataset.as_numpy_iterator()
    if hasattr(dataset, "on_epoch_end") and hasattr(dataset, "__getitem__"):
        return _of_py_dataset(dataset)
    return (jax.tree.map(np.asarray, batch) for batch in dataset)


def _of_py_dataset(dataset: Any) -> Iterator[Tree]:
    for index in range(len(dataset)):
        yield jax.tree.map(np.asarray, dataset[index])
    dataset.on_epoch_end()


def check_batches(dataset: Any) -> None:
    """Raises TypeError for what cannot be iterated over in batches."""
    if isinstance(dataset, np.ndarray | jax.Array | dict | tuple | list):
        raise TypeError(
            "A dataset yields global batches. Received: "
            f"{type(dataset).__name__}. Make batches of arrays with "
            "`experimental_make_numpy_dataset(arrays).batch(batch_size)`."
        )
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "A dataset yields global batches. Received: an object of type "
            f"{type(dataset).__name__}, which is not iterable. Pass a "
            "tf.data.Dataset, a keras PyDataset or an iterable of batches."
        )


class NumpyDataset:
    """Arrays as a dataset of their rows; `batch` makes it one of batches.

    Args:
      arrays: A nest of arrays; lists in it are stacked to arrays.
      batch_size: Rows of a batch; None yields single rows.
      drop_remainder: Whether a short last batch is left out.
    """

    def __init__(
        self,
        arrays: Tree,
        batch_size: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        self._arrays = jax.tree.map(
            np.asarray, arrays, is_leaf=lambda leaf: isinstance(leaf, list)
        )
        self._rows = num_rows(self._arrays)
        self._batch_size = batch_size
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
        return NumpyDataset(self._arrays, batch_size, drop_remainder)

    def __len__(self) -> int:
        """Number of batches, or of rows."""
        size = self._batch_size or 1
        rows = (
            self._rows
            if not self._drop_remainder
            else (self._rows - self._rows % size)
        )
        return -(-rows // size)

    def __iter__(self) -> Iterator[Tree]:
        """Yields batches, or rows."""
        for index in range(len(self)):
            if self._batch_size is None:
                yield jax.tree.map(lambda a, i=index: a[i], self._arrays)
                continue
            start = index * self._batch_size
            part = slice(start, start + self._batch_size)
            yield jax.tree.map(lambda a, part=part: a[part], self._arrays)
