"""The data of fit, evaluate and predict, as executions on the devices.

Keras passes a `DataAdapter` given as `x` through untouched: that is the door.
The adapter that Keras would have made reads the user's data, so its rules
(shuffling, class weights, workers) hold as they are.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import (
    array_slicing,
    data_adapter_utils,
    get_data_adapter,
)
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)

from keras_strategies._core.batches import (
    Execution,
    check_numbers,
    num_rows,
    place,
)
from keras_strategies._core.mesh import ReplicaMesh

Tree = Any


class Feed(DataAdapter):
    """Reads host batches and yields executions of up to K of them.

    Args:
      source: Keras's adapter of the user's data.
      mesh: The replicas that the rows are split over.
      steps_per_execution: K.
      steps_per_epoch: Where an epoch ends before the data does; no execution
        reaches over it.
    """

    def __init__(
        self,
        source: DataAdapter,
        mesh: ReplicaMesh,
        *,
        steps_per_execution: int = 1,
        steps_per_epoch: int | None = None,
    ) -> None:
        if source.num_batches == 0:
            raise ValueError(_NO_ROWS)
        self._source = source
        self._mesh = mesh
        self._steps_per_execution = steps_per_execution
        self._steps_per_epoch = steps_per_epoch
        # User code may fill one buffer again and again, and the next batch is
        # asked for while the last one is being read.
        self._is_copying = isinstance(
            source, GeneratorDataAdapter | PyDatasetAdapter
        )
        self._has_rows = False
        self._signature: Any = None
        self._first: Tree = None

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Host batches; used to build a model that is not built yet."""
        for batch in _host_batches(self._source):
            if self._is_copying:
                batch = jax.tree.map(np.array, batch)
            num_rows(batch)
            self._has_rows = True
            yield batch
        if not self._has_rows:
            raise ValueError(_NO_ROWS)

    def get_jax_iterator(self) -> Iterator[Execution]:
        """Executions whose arrays lie on the devices."""
        batches = enumerate(self.get_numpy_iterator())
        while True:
            group: list[Tree] = []
            for index, batch in batches:
                self._check_structure(index, batch)
                group.append(batch)
                is_last = self._steps_per_epoch and (
                    (index + 1) % self._steps_per_epoch == 0
                )
                if is_last or len(group) == self._steps_per_execution:
                    break
            if not group:
                return
            yield place(group, self._mesh)

    def _check_structure(self, index: int, batch: Tree) -> None:
        leaves, structure = jax.tree.flatten(batch)
        # Types that are one on the devices (float64 is float32) are one here.
        signature = (
            structure,
            [
                (leaf.ndim, jax.dtypes.canonicalize_dtype(leaf.dtype))
                for leaf in leaves
            ],
        )
        if self._signature is None:
            self._signature = signature
            self._first = _summary(batch)
        elif signature != self._signature:
            raise ValueError(
                "All batches must have the same structure, ranks and dtypes. "
                f"Received: first batch {self._first}, batch {index} "
                f"{_summary(batch)}. Make the dataset yield one structure."
            )

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._source.num_batches

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, if known."""
        return self._source.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is shorter, if known."""
        return self._source.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        """Rows of the shorter last batch, if any."""
        return self._source.partial_batch_size

    def on_epoch_begin(self) -> None:
        """Called by Keras before each epoch."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Called by Keras after each epoch."""
        self._source.on_epoch_end()


def make_feed(
    mesh: ReplicaMesh,
    *,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    batch_size: int | None = None,
    shuffle: Any = False,
    steps_per_epoch: int | None = None,
    steps_per_execution: int = 1,
) -> Any:
    """Returns the feed of what was given to fit, evaluate or predict.

    Data that is a Keras adapter already (a feed) is returned as it is.
    """
    if isinstance(x, DataAdapter):
        return x
    for array in tree.flatten((x, y, sample_weight)):
        if isinstance(array, np.ndarray):
            check_numbers(array)
    source = get_data_adapter(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
    )
    return Feed(
        source,
        mesh,
        steps_per_execution=steps_per_execution,
        steps_per_epoch=steps_per_epoch,
    )


def split_validation(
    x: Any, y: Any, sample_weight: Any, fraction: float
) -> Any:
    """Splits off the last rows for validation, as Keras does."""
    return array_slicing.train_validation_split(
        (x, y, sample_weight), validation_split=fraction
    )


def unpack_validation(data: Any) -> tuple[Any, Any, Any]:
    """Divides `validation_data` into x, y and sample weights."""
    return data_adapter_utils.unpack_x_y_sample_weight(data)


def batch_weights(y: Any, sample_weight: Any, class_weight: Any) -> Any:
    """The sample weights of `train_on_batch`, with its class weights."""
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise ValueError(
            "Arguments `sample_weight` and `class_weight` cannot be given "
            "together. Received both. Multiply the class weights into "
            "`sample_weight`."
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def place_batch(batch: Tree, mesh: ReplicaMesh) -> Execution:
    """Moves one batch of a `*_on_batch` call to the devices."""
    return place([_host_batch(batch)], mesh)


def _host_batches(source: Any) -> Iterator[Tree]:
    """The batches of Keras's adapter as numpy arrays."""
    arrays = _numpy_arrays(source)
    if arrays is None:
        for batch in source.get_numpy_iterator():
            yield _host_batch(batch)
        return
    # Keras chooses the rows; taking them one array after the other through
    # its nests would cost as much as a small step.
    leaves, structure = jax.tree.flatten(arrays)

    def take(_: Any, indices: Any) -> list[np.ndarray]:
        return [leaf[indices] for leaf in leaves]

    for batch in source._get_iterator(take, 0):
        yield jax.tree.unflatten(structure, batch)


def _numpy_arrays(source: Any) -> Tree:
    """The nest of an array adapter's arrays if all are numpy's, or None."""
    if type(source) is not ArrayDataAdapter:
        return None
    inputs = array_slicing.convert_to_sliceable(
        source._inputs, target_backend="numpy"
    )
    if not all(
        type(leaf) is array_slicing.NumpySliceable
        for leaf in jax.tree.leaves(inputs)
    ):
        return None
    return jax.tree.map(lambda leaf: leaf.array, inputs)


_NO_ROWS = (
    "Training, evaluation and prediction need at least one row. Received: "
    "data without any. Check the dataset, its filters and its batch size."
)


def _host_batch(batch: Tree) -> Tree:
    """The batch with its leaves as numpy arrays; sparse ones made dense."""
    return jax.tree.map(_as_numpy, batch, is_leaf=_is_sparse)


def _is_sparse(value: Any) -> bool:
    # Of jax too, whose sparse arrays are nests of their parts elsewhere.
    return hasattr(value, "todense")


def _as_numpy(leaf: Any) -> np.ndarray:
    if type(leaf) is np.ndarray:
        return leaf
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        leaf = data_adapter_utils.tf_sparse_to_jax_sparse(leaf)
    if _is_sparse(leaf):
        leaf = leaf.todense()
    return np.asarray(leaf)


def _summary(batch: Tree) -> str:
    return str(
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", batch)
    )
