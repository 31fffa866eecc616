"""Sources that read the user's data through Keras's adapters.

Keras's adapters decide which objects are arrays, apply class weights, run
workers and read the first batches of a generator. The sources in this module
only choose the rows that each process reads, and shuffle reproducibly.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
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

from keras_strategies._types import Array, Batch, Tree
from keras_strategies.data.source import (
    Cut,
    Part,
    Source,
    rows_checksum,
    rows_to_checksum,
    take,
)
from keras_strategies.data.sources.files import is_mapped, let_go
from keras_strategies.data.sources.numpy_dataset import IndexedSource
from keras_strategies.keras_bridge.keras_names import BATCH_ORDER, ROW_ORDER
from keras_strategies.spmd import host_arrays
from keras_strategies.spmd.batches import num_rows


def compute_batch_weights(
    y: Tree, sample_weight: Tree, class_weight: Mapping[int, float] | None
) -> Tree:
    """Computes the sample weights of `train_on_batch` from class weights.

    Returns:
      Weights of shape (rows,), or a nest of such arrays. Without class weights,
      the unchanged `sample_weight`, which may be None.
    """
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise ValueError(
            "`sample_weight` and `class_weight` cannot be passed together. "
            "Multiply them, and pass the product as `sample_weight`."
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def split_validation(call: Any) -> None:
    """Splits off the last rows for validation, if fit has `validation_split`.

    Args:
      call: The `Call` of `fit`. Its data and `validation_data` are replaced.

    Raises:
      ValueError: if `validation_split` is not in [0, 1).
    """
    fraction = call["validation_split"]
    if fraction and not 0 < fraction < 1:
        raise ValueError(
            "`validation_split` must be a fraction of the rows, in [0, 1). "
            f"Received: validation_split={fraction!r}. Pass for example 0.2 to "
            "validate on a fifth of the rows."
        )
    if fraction and call["validation_data"] is None:
        data = call["x"], call["y"], call["sample_weight"]
        parts: Any = array_slicing.train_validation_split(data, fraction)
        (x, y, weight), held_out = parts
        call.set(x=x, y=y, sample_weight=weight)
        call.set(validation_data=held_out, validation_split=0.0)


class ArraySource(IndexedSource):
    """A source of arrays in memory, or of memory-mapped files.

    Args:
      adapter: Keras's adapter for the arrays.
    """

    kind = "arrays"

    def __init__(self, adapter: Any) -> None:
        rows, size = adapter._num_samples, adapter.batch_size
        super().__init__(rows, size, adapter.num_batches)
        inputs = keras.tree.map_structure(_make_sliceable, adapter._inputs)
        # The nest is flattened only once. Keras traverses the nest for every
        # batch, which would take as long as a small step.
        self._leaves, self._structure = jax.tree.flatten(inputs)
        if adapter._shuffle:
            window = size if adapter._shuffle == "batch" else None
            self.order = ROW_ORDER(rows, window)

    def rows_at(self, indices: slice | np.ndarray) -> Tree:
        """Returns the rows at `indices`; see `IndexedSource.rows_at`."""
        leaves = [_take_rows(leaf, indices) for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _take_rows(
    leaf: array_slicing.Sliceable, indices: slice | np.ndarray
) -> Array:
    if type(leaf) is not array_slicing.NumpySliceable:
        return to_numpy(leaf.convert_to_numpy(leaf[indices]))
    if isinstance(indices, slice):
        return leaf.array[indices]
    return host_arrays.take_rows(leaf.array, indices)


def _make_sliceable(array: Array) -> Any:
    if is_mapped(array):
        return _MappedRows(array)
    return array_slicing.convert_to_sliceable(array, target_backend="numpy")


class _MappedRows(array_slicing.NumpySliceable):
    """The rows of a memory-mapped array.

    Rows are in memory only while they are needed. Keras would cast the entire
    array at the beginning, and so read the entire file.
    """

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


class GeneratorSource(Source):
    """A source of the batches of a generator.

    Args:
      adapter: Keras's adapter for the generator.
      has_checksums: See `ks.data.take`.
    """

    kind = "a generator"

    def __init__(self, adapter: DataAdapter, *, has_checksums: bool) -> None:
        self._adapter = adapter
        self._has_checksums = has_checksums
        self.num_batches = adapter.num_batches
        # This is the size of the first batch.
        self.batch_size = adapter.batch_size

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Begins an epoch of the adapter; see `Source.begin_epoch`."""
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """Ends an epoch of the adapter; see `Source.end_epoch`."""
        self._adapter.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """Yields this process's parts of the batches; see `Source.read`."""
        del epoch
        batches = self._adapter.get_jax_iterator()
        for batch in itertools.islice(batches, start, None):
            # The generator may reuse the buffers of a batch.
            yield take(
                to_host_batch(batch),
                cut,
                has_checksums=self._has_checksums,
                is_copied=True,
            )


class PyDatasetSource(Source):
    """A source of the batches of a `keras.utils.PyDataset`.

    The batches are read by the dataset's workers.

    Args:
      adapter: Keras's adapter for the dataset.
      is_process_local: Whether the rows are process-local.
      has_checksums: Whether the processes check that they read equal batches.
        Only targets and weights are compared, if there are any, because each
        process may augment the inputs differently.
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
        """Begins an epoch of the dataset; see `Source.begin_epoch`."""
        self._error = None
        try:
            self._dataset.on_epoch_begin()
        except Exception as error:
            # `read` raises the error later, because errors of `read` are sent
            # to all processes.
            self._error = error

    def end_epoch(self) -> None:
        """Ends an epoch of the dataset; see `Source.end_epoch`."""
        self._dataset.on_epoch_end()

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """Yields this process's parts of the batches; see `Source.read`."""
        order = None
        if self.order is not None:
            # The dataset may have changed its number of batches at the end of
            # the last epoch.
            self.order.resize(self._dataset.num_batches)
            order = self.order.compute(epoch)
        view = _View(self._dataset, start, order)
        if self._error is not None:
            raise self._error
        if view.num_batches == 0:
            return
        # Each pass has a new adapter. If a pass is not read to its end, its
        # adapter's workers have read ahead, and the adapter would yield these
        # batches in the next pass.
        adapter = PyDatasetAdapter(view, class_weight=self._class_weight)
        try:
            for batch in adapter.get_jax_iterator():
                batch = to_host_batch(batch)
                part, checksum = take(batch, cut, is_copied=True), None
                if self._has_checksums:
                    checksum = _compute_target_checksum(batch)
                yield dataclasses.replace(part, checksum=checksum)
        finally:
            if adapter.enqueuer is not None:
                # The pass is over, so errors in the workers are ignored.
                with contextlib.suppress(Exception):
                    adapter.enqueuer.stop()


class _View(keras.utils.PyDataset):
    """A PyDataset that returns another PyDataset's batches in a given order.

    `order` contains indices of batches, or is None to keep the order of the
    other dataset. The first `first` batches in this order are skipped.
    """

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


def _compute_target_checksum(batch: Tree) -> int:
    if isinstance(batch, tuple) and len(batch) > 1:
        batch = batch[1:]
    return rows_checksum(batch, rows_to_checksum(num_rows(batch)))


def make_array_source(arrays: Tree, batch_size: int) -> ArraySource:
    """Makes a source that reads the rows of arrays, in their order."""
    return ArraySource(ArrayDataAdapter(arrays, batch_size=batch_size))


def are_arrays(values: Tree) -> bool:
    """Returns whether Keras treats all values of a nest as arrays."""
    return can_convert_arrays(values)


def to_host_batch(batch: Tree) -> Tree:
    """Converts the leaves of a batch to dense NumPy arrays.

    Arrays on several devices are not converted, because they may already be on
    the devices that need them.

    Returns:
      A batch of the same structure.
    """
    return jax.tree.map(to_numpy, batch, is_leaf=_is_sparse)


def to_numpy(leaf: Array) -> Array:
    """Converts one leaf of a batch; see `to_host_batch`.

    Returns:
      A NumPy array, or `leaf` itself if it is on several devices.
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
    # This includes JAX's sparse arrays, which JAX would otherwise flatten into
    # their components.
    return hasattr(value, "todense")
