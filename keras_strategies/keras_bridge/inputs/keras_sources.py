"""Sources that read through Keras's own adapters of the user's data.

Keras's rules (what counts as an array, class weights, workers, a generator's
first batches) hold as they are; what is ours is which rows a process reads,
and orders that can be found again.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from keras_strategies._core import host_arrays
from keras_strategies._core.batches import num_rows
from keras_strategies._types import Array, Batch, Tree
from keras_strategies.data.source import (
    Cut,
    Part,
    Source,
    rows_checksum,
    rows_to_checksum,
    take,
)
from keras_strategies.data.sources.mapped_arrays import is_mapped, let_go
from keras_strategies.data.sources.numpy_dataset import IndexedSource
from keras_strategies.keras_bridge.keras_names import BATCH_ORDER, ROW_ORDER


class ArraySource(IndexedSource):
    """Arrays in memory (or mapped into it).

    Args:
      adapter: Keras's adapter of them.
    """

    kind = "arrays"

    def __init__(self, adapter: Any) -> None:
        rows, size = adapter._num_samples, adapter.batch_size
        super().__init__(rows, size, adapter.num_batches)
        inputs = keras.tree.map_structure(_sliceable, adapter._inputs)
        # Keras takes the rows one array after the other through its nests,
        # which would cost as much as a small step.
        self._leaves, self._structure = jax.tree.flatten(inputs)
        if adapter._shuffle:
            window = size if adapter._shuffle == "batch" else None
            self.order = ROW_ORDER(rows, window)

    def rows_at(self, indices: slice | np.ndarray) -> Tree:
        """See `IndexedSource.rows_at`."""
        leaves = [_rows_of(leaf, indices) for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _rows_of(
    leaf: array_slicing.Sliceable, indices: slice | np.ndarray
) -> Array:
    if type(leaf) is not array_slicing.NumpySliceable:
        return as_numpy(leaf.convert_to_numpy(leaf[indices]))
    if isinstance(indices, slice):
        return leaf.array[indices]
    return host_arrays.taken(leaf.array, indices)


def _sliceable(array: Array) -> Any:
    if is_mapped(array):
        return _MappedRows(array)
    return array_slicing.convert_to_sliceable(array, target_backend="numpy")


class _MappedRows(array_slicing.NumpySliceable):
    """Rows of an array that lies in a file, which stay in memory no longer
    than they are needed. Keras would cast all of them at once."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        is_float = keras.backend.is_float_dtype(array.dtype.name)
        self._dtype = keras.config.floatx() if is_float else array.dtype

    def __getitem__(self, indices: slice | np.ndarray) -> np.ndarray:
        is_view = isinstance(indices, slice)
        rows = np.array(
            self.array[indices], self._dtype, copy=True if is_view else None
        )
        let_go(self.array)
        return rows


class AdapterSource(Source):
    """Whatever Keras has an adapter for, read batch by batch.

    Args:
      adapter: The adapter.
      kind: What it reads, for messages.
      has_checksums: See `take`.
      is_copied: Whether user code may fill the same buffers again while a
        batch is still needed.
    """

    kind = "batches"

    def __init__(
        self,
        adapter: DataAdapter,
        *,
        kind: str,
        has_checksums: bool,
        is_copied: bool,
    ) -> None:
        self._adapter = adapter
        self._has_checksums = has_checksums
        self._is_copied = is_copied
        self.kind = kind  # pyright: ignore[reportAttributeAccessIssue]
        self.num_batches = adapter.num_batches
        # A generator's is that of its first batch, whatever follows.
        self.batch_size = adapter.batch_size

    def begin_epoch(self, epoch: int, start: int) -> None:
        """See `Source.begin_epoch`."""
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """See `Source.end_epoch`."""
        self._adapter.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        del epoch
        for index, batch in enumerate(self._adapter.get_jax_iterator()):
            if index < start:
                continue
            yield take(
                host_batch(batch),
                cut,
                has_checksums=self._has_checksums,
                is_copied=self._is_copied,
            )


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, with its workers.

    Args:
      adapter: Keras's adapter of it.
      is_process_local: Whether each process has rows of its own.
      has_checksums: Whether the processes compare their batches: the targets
        and weights, where there are some, since inputs may be augmented in
        another way by each.
    """

    kind = "a PyDataset"

    def __init__(
        self,
        adapter: PyDatasetAdapter,
        *,
        is_process_local: bool = False,
        has_checksums: bool = False,
    ) -> None:
        self.is_process_local = is_process_local
        self._has_checksums = has_checksums and not is_process_local
        self._error: Exception | None = None
        self.num_batches = adapter.num_batches
        self._dataset = adapter.py_dataset
        self._class_weight = adapter.class_weight
        if adapter.shuffle and self.num_batches is not None:
            self.order = BATCH_ORDER(self.num_batches)

    def begin_epoch(self, epoch: int, start: int) -> None:
        """See `Source.begin_epoch`."""
        self._error = None
        try:
            self._dataset.on_epoch_begin()
        except Exception as error:
            # Raised where it is read: there it is sent to all processes.
            self._error = error

    def end_epoch(self) -> None:
        """See `Source.end_epoch`."""
        self._dataset.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        order = None
        if self.order is not None:
            # It may have become another one at the end of the epoch before.
            self.order.resize(self._dataset.num_batches)
            order = self.order.of(epoch)
        view = _View(self._dataset, start, order)
        if self._error is not None:
            raise self._error
        if view.num_batches == 0:
            return
        # One adapter for each pass: what the workers of one that was left
        # have read is yielded by the next pass of the same adapter.
        adapter = PyDatasetAdapter(view, class_weight=self._class_weight)
        try:
            yield from self._parts(adapter, cut)
        finally:
            if adapter.enqueuer is not None:
                # Nobody waits for what the workers raise now.
                with contextlib.suppress(Exception):
                    adapter.enqueuer.stop()

    def _parts(self, adapter: PyDatasetAdapter, cut: Cut) -> Iterator[Part]:
        for batch in adapter.get_jax_iterator():
            batch = host_batch(batch)
            part = take(batch, cut, is_copied=True)
            checksum = (
                _checksum_of_targets(batch) if self._has_checksums else None
            )
            yield dataclasses.replace(part, checksum=checksum)


class _View(keras.utils.PyDataset):
    """A PyDataset's batches in another order, from one of them on."""

    def __init__(
        self,
        dataset: Any,
        first: int,
        order: np.ndarray | None,
    ) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._first = first
        self._order = order

    @property
    def num_batches(self) -> int | None:
        size = self._dataset.num_batches
        return None if size is None else size - self._first

    def __getitem__(self, index: int) -> Batch:
        index += self._first
        if self._order is not None:
            index = int(self._order[index])
        return self._dataset[index]


def _checksum_of_targets(batch: Tree) -> int:
    if isinstance(batch, tuple) and len(batch) > 1:
        batch = batch[1:]
    return rows_checksum(batch, rows_to_checksum(num_rows(batch)))


def source_of_arrays(arrays: Tree, batch_size: int) -> ArraySource:
    """The source of a nest of arrays, in their order."""
    return ArraySource(ArrayDataAdapter(arrays, batch_size=batch_size))


def are_arrays(values: Tree) -> bool:
    """Whether all values of a nest are what Keras takes for arrays."""
    return can_convert_arrays(values)


def host_batch(batch: Tree) -> Tree:
    """The batch with its leaves as numpy arrays; sparse ones made dense.

    Arrays that lie on several devices are left alone: they may be where they
    are wanted.

    Returns:
      A batch of the same structure.
    """
    return jax.tree.map(as_numpy, batch, is_leaf=_is_sparse)


def as_numpy(leaf: Array) -> Array:
    """An array of numpy, for `host_batch`.

    Returns:
      An array of numpy, or one that lies on several devices as it is.
    """
    if type(leaf) is np.ndarray or _is_distributed(leaf):
        return leaf
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        leaf = data_adapter_utils.tf_sparse_to_jax_sparse(leaf)
    if _is_sparse(leaf):
        leaf = leaf.todense()
    return np.asarray(leaf)


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def _is_sparse(value: object) -> bool:
    # Of jax too, whose sparse arrays are nests of their parts elsewhere.
    return hasattr(value, "todense")
