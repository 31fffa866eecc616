"""Sources that read through Keras's own adapters of the user's data.

Keras's rules (what counts as an array, class weights, workers, a generator's
first batches) hold as they are; what is ours is which rows a process reads,
and orders that can be found again.
"""

from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters import (
    array_slicing,
    data_adapter_utils,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)

from keras_strategies.data.order import BatchOrder, RowOrder
from keras_strategies.data.source import Cut, Part, Source, take

Tree = Any


class ArraySource(Source):
    """Arrays in memory (or mapped into it): any row can be read.

    Args:
      adapter: Keras's adapter of them.
    """

    kind = "arrays"
    is_planned = True

    def __init__(self, adapter: Any) -> None:
        inputs = array_slicing.convert_to_sliceable(
            adapter._inputs, target_backend="numpy"
        )
        self._leaves, self._structure = jax.tree.flatten(inputs)
        # Keras takes the rows one array after the other through its nests,
        # which would cost as much as a small step.
        self._is_plain = [
            type(leaf) is array_slicing.NumpySliceable for leaf in self._leaves
        ]
        self._rows = adapter._num_samples
        self.batch_size = adapter.batch_size
        self.num_batches = adapter.num_batches
        if adapter._shuffle:
            window = self.batch_size if adapter._shuffle == "batch" else None
            self.order = RowOrder(self._rows, window)

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch."""
        return self._rows

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        size = self.batch_size
        assert size is not None
        order = None if self.order is None else self.order.of(epoch)
        for first in range(start * size, self._rows, size):
            rows = min(size, self._rows - first)
            begin, end = cut(rows)
            indices: Any = slice(first + begin, first + end)
            if order is not None:
                indices = order[indices]
            leaves = [
                leaf.array[indices]
                if is_plain
                else as_numpy(leaf.convert_to_numpy(leaf[indices]))
                for leaf, is_plain in zip(
                    self._leaves, self._is_plain, strict=True
                )
            ]
            yield Part(
                data=jax.tree.unflatten(self._structure, leaves), rows=rows
            )


class AdapterSource(Source):
    """Whatever Keras has an adapter for, read batch by batch.

    Args:
      adapter: The adapter.
      is_own: Whether each process has rows of its own.
      is_marked: See `take`.
      is_copied: Whether user code may fill the same buffers again while a
        batch is still needed.
    """

    kind = "batches"

    def __init__(
        self,
        adapter: DataAdapter,
        *,
        kind: str,
        is_own: bool,
        is_marked: bool,
        is_copied: bool,
    ) -> None:
        self._adapter = adapter
        self._is_marked = is_marked
        self._is_copied = is_copied
        self.kind = kind  # pyright: ignore[reportAttributeAccessIssue]
        self.is_own = is_own
        self.num_batches = adapter.num_batches
        # A generator's is that of its first batch, whatever follows.
        self.batch_size = None if is_own else adapter.batch_size

    def begin_epoch(self, epoch: int, start: int) -> None:
        """See `Source.begin_epoch`."""
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """See `Source.end_epoch`."""
        self._adapter.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        del epoch
        for index, batch in enumerate(self._adapter.get_numpy_iterator()):
            if index < start:
                continue
            part = take(host_batch(batch), cut, is_marked=self._is_marked)
            if self._is_copied:
                data = jax.tree.map(np.array, part.data)
                part = Part(data=data, rows=part.rows, mark=part.mark)
            yield part


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, with its workers.

    Args:
      adapter: Keras's adapter of it.
      is_own: Whether each process has rows of its own.
    """

    kind = "a PyDataset"

    def __init__(self, adapter: Any, *, is_own: bool = False) -> None:
        self.is_own = is_own
        self.num_batches = adapter.num_batches
        self._view = _View(adapter.py_dataset)
        if adapter.shuffle and self.num_batches is not None:
            self.order = BatchOrder(self.num_batches)
        self._adapter = PyDatasetAdapter(
            self._view, class_weight=adapter.class_weight, shuffle=False
        )

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Chooses the batches, and starts the workers."""
        self._choose(epoch, start)
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """Stops the workers."""
        self._adapter.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        self._choose(epoch, start)
        if self._view.num_batches == 0:
            return
        for batch in self._adapter.get_numpy_iterator():
            part = take(host_batch(batch), cut)
            # Its next item may be put into the same buffers.
            data = jax.tree.map(np.array, part.data)
            yield Part(data=data, rows=part.rows)

    def _choose(self, epoch: int, start: int) -> None:
        self._view.first = start
        if self.order is not None:
            self._view.order = self.order.of(epoch)


class _View(keras.utils.PyDataset):
    """A PyDataset's batches in another order, from one of them on."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self.first = 0
        self.order: np.ndarray | None = None

    @property
    def num_batches(self) -> int | None:
        size = self._dataset.num_batches
        return None if size is None else size - self.first

    def __getitem__(self, index: int) -> Any:
        index += self.first
        if self.order is not None:
            index = int(self.order[index])
        return self._dataset[index]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def host_batch(batch: Tree) -> Tree:
    """The batch with its leaves as numpy arrays; sparse ones made dense."""
    return jax.tree.map(as_numpy, batch, is_leaf=_is_sparse)


def as_numpy(leaf: Any) -> np.ndarray:
    """An array of numpy; a sparse one made dense."""
    if type(leaf) is np.ndarray:
        return leaf
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        leaf = data_adapter_utils.tf_sparse_to_jax_sparse(leaf)
    if _is_sparse(leaf):
        leaf = leaf.todense()
    return np.asarray(leaf)


def _is_sparse(value: Any) -> bool:
    # Of jax too, whose sparse arrays are nests of their parts elsewhere.
    return hasattr(value, "todense")
