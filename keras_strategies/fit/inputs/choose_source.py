"""Chooses the source that reads a user's data."""

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import (
    data_adapter_utils,
    get_data_adapter,
    is_grain_dataset,
    is_tf_dataset,
)
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDataset,
    PyDatasetAdapter,
)

from keras_strategies._types import Dataset
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.grain.grain_data import GrainSource
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import Cut, Part, Passes, Source
from keras_strategies.data.sources import iterables
from keras_strategies.data.sources.file_source import FilesSource
from keras_strategies.data.sources.files import Files
from keras_strategies.data.sources.numpy_dataset import NumpyDataset, RowsSource
from keras_strategies.data.sources.torch_data import TorchSource, is_torch
from keras_strategies.data.tfdata.tf_data import TfDataSource
from keras_strategies.fit.inputs.agree_source import (
    build_on_all_processes,
)
from keras_strategies.fit.inputs.keras_sources import (
    ArraySource,
    GeneratorSource,
    PyDatasetSource,
)
from keras_strategies.gpu.topology_devices import hide_gpus
from keras_strategies.spmd.host_arrays import check_numbers
from keras_strategies.spmd.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopData:
    """The data passed to `fit`, `evaluate` or `predict`.

    Attributes:
      x: The inputs: a nest of arrays, or a dataset of batches.
      y: The targets, if `x` is a nest of arrays.
      sample_weight: A weight for each row, if `x` is a nest of arrays.
      class_weight: Maps a class to the weight of the rows of that class.
      batch_size: The number of rows of a global batch, if `x` is a nest of
        arrays.
      shuffle: Whether to shuffle the rows of arrays in each epoch.
      steps_per_epoch: The number of steps in an epoch. None if an epoch is a
        full pass over the data.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    batch_size: int | None = None
    shuffle: Any = False
    steps_per_epoch: int | None = None


def make_loop_source(
    mesh: ReplicaMesh, data: LoopData, *, name: str, facts: dict[str, Any]
) -> Source:
    """Makes the source for `fit`, `evaluate` or `predict`. Collective.

    Raises:
      ValueError: if the arguments cannot be combined, as in Keras.
      RuntimeError: if another process could not make its source.
    """
    choose = functools.partial(_choose_source, mesh, data=data)
    draws = _draws_orders(data.x)
    return build_on_all_processes(mesh, f"`{name}`", choose, facts, draws=draws)


def make_dataset_source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    *,
    policy: AutoShardPolicy | None = None,
) -> Source:
    """Makes the source of a dataset that yields batches. Collective.

    Args:
      dataset: The dataset.
      mesh: The mesh of the replicas.
      policy: How several processes share the dataset. None for the policy in
        the dataset's options, or for AUTO if no policy is set there.

    Raises:
      TypeError: if `dataset` is not a dataset.
      ValueError: if the policy does not apply to the dataset.
      RuntimeError: if another process cannot read its dataset.
    """
    choose = functools.partial(make_local_source, dataset, mesh, policy=policy)
    name = "`experimental_distribute_dataset`"
    return build_on_all_processes(
        mesh, name, choose, draws=_draws_orders(dataset)
    )


def make_local_source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    seed: int,
    *,
    policy: AutoShardPolicy | None = None,
    batch_size: int | None = None,
    shuffle: bool = False,
) -> Source:
    """Makes a source that reads a dataset for this process. Not collective.

    Args:
      dataset: The dataset.
      mesh: The mesh of the replicas.
      seed: The seed for shuffling, used if the dataset has no seed. It must be
        equal in all processes.
      policy: See `make_dataset_source`.
      batch_size: The batch size for a torch dataset that is passed without a
        `DataLoader`.
      shuffle: Whether to shuffle a torch dataset that is passed without a
        `DataLoader`.

    Raises:
      TypeError: if `dataset` is not a dataset.
      ValueError: if the policy does not apply to the dataset.
    """
    places: dict[str, Any] = {
        "num_processes": mesh.num_readers,
        "process_index": mesh.reader_index,
        "seed": seed,
    }
    if is_tf_dataset(dataset):
        hide_gpus()
        copy = mesh.place_among_readers if mesh.spans_processes else None
        return TfDataSource(dataset, policy=policy, copy=copy, **places)
    chosen = AutoShardPolicy.AUTO if policy is None else policy
    is_source = isinstance(dataset, Source)
    is_by_file = isinstance(dataset, Files) and chosen is AutoShardPolicy.FILE
    needs_files = chosen in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)
    if (needs_files and not is_by_file) or (
        is_source and chosen is not AutoShardPolicy.AUTO
    ):
        raise ValueError(
            "FILE and HINT only apply to datasets that read files with "
            "tf.data, and FILE to `ks.data.files`. A `ks.data.Source` itself "
            "decides which rows each process reads. Received: "
            f"`AutoShardPolicy.{chosen.name}` for an object of type "
            f"{type(dataset).__name__}. Use AUTO or DATA, or OFF if each "
            "process has different rows. For a source, pass no policy; set "
            "its `is_process_local` if the rows are process-local."
        )
    if is_source:
        return dataset
    if isinstance(dataset, Files):
        return FilesSource(dataset, policy=chosen, **places)
    if is_torch(dataset):
        loading = {"batch_size": batch_size, "shuffle": shuffle}
        return TorchSource(dataset, policy=chosen, **loading, **places)
    if is_grain_dataset(dataset):
        return GrainSource(dataset, policy=chosen, **places)
    return _make_batch_source(dataset, mesh, chosen)


def _make_batch_source(
    dataset: Dataset, mesh: ReplicaMesh, chosen: AutoShardPolicy
) -> Source:
    """Makes a source that reads arrays, a `PyDataset` or another iterable."""
    is_process_local = mesh.num_readers > 1 and chosen is AutoShardPolicy.OFF
    if isinstance(dataset, NumpyDataset) and not is_process_local:
        return RowsSource(dataset)
    shared: dict[str, Any] = {
        "is_process_local": is_process_local,
        "has_checksums": mesh.num_processes > 1,
    }
    if isinstance(dataset, PyDataset):
        return PyDatasetSource(PyDatasetAdapter(dataset), **shared)
    return iterables.IterableSource(dataset, **shared)


def _choose_source(mesh: ReplicaMesh, seed: int, *, data: LoopData) -> Source:
    for array in tree.flatten((data.x, data.y, data.sample_weight)):
        if isinstance(array, np.ndarray):
            check_numbers(array)
    adapter: Any = None
    if not _is_read_without_keras(data.x):
        adapter = get_data_adapter(**vars(data))
    if type(adapter) is ArrayDataAdapter:
        return ArraySource(adapter)
    has_checksums = mesh.num_processes > 1
    if isinstance(adapter, PyDatasetAdapter):
        return PyDatasetSource(adapter, has_checksums=has_checksums)
    if isinstance(adapter, GeneratorDataAdapter):
        return GeneratorSource(adapter, has_checksums=has_checksums)
    source = _make_without_adapter(mesh, seed, data)
    if source.is_infinite and not data.steps_per_epoch:
        raise ValueError(
            "The dataset repeats forever, so an epoch needs a number of steps. "
            "Pass "
            "`steps_per_epoch` (in `evaluate` and `predict`: `steps`), or "
            "remove `.repeat()`."
        )
    if data.class_weight:
        return cast(Source, _Weighted(source, data.class_weight))
    return source


def _make_without_adapter(
    mesh: ReplicaMesh, seed: int, data: LoopData
) -> Source:
    """Makes a source that reads a dataset without Keras's adapters."""
    x = data.x
    if data.y is not None or data.sample_weight is not None:
        raise ValueError(
            "If `x` is a dataset, its batches must contain the targets and "
            "sample weights. Received: `y` or `sample_weight` with an `x` of "
            f"type {type(x).__name__}. Make the dataset yield tuples "
            "(x, y, sample_weight)."
        )
    if isinstance(x, DistributedDataset):
        return x.source
    source = make_local_source(
        x, mesh, seed, batch_size=data.batch_size, shuffle=bool(data.shuffle)
    )
    source.passes = _get_passes(x)
    return source


class _Weighted:
    """A source that adds class weights to the batches of another source.

    All other attributes and methods are those of the other source.
    """

    def __init__(self, source: Source, class_weight: dict[int, float]) -> None:
        self._source = source
        self._class_weight = class_weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        self._source.is_peeked = self.is_peeked
        for part in self._source.read(epoch, start, cut):
            data = part.data
            if not isinstance(data, list | tuple) or len(data) != 2:
                raise ValueError(
                    "`class_weight` needs batches of inputs and one target, "
                    "without sample weights. Received: batches of "
                    f"{len(data)} entries. Multiply the sample weights by the "
                    "class weights, and do not pass `class_weight`."
                )
            weight = data_adapter_utils.class_weight_to_sample_weights(
                data[1], self._class_weight
            )
            data = (*data, np.asarray(weight))
            yield dataclasses.replace(part, data=data)


def _draws_orders(x: Dataset) -> bool:
    """Returns whether a source needs a random seed to shuffle a dataset."""
    return isinstance(x, Files) or is_tf_dataset(x) or is_torch(x)


# The counters of passes over datasets, by the datasets' ids. The shuffle order
# of a pass depends on the number of earlier passes.
_passes: dict[int, Passes] = {}


def _get_passes(dataset: Dataset) -> Passes:
    """Returns the counter of passes over a dataset.

    The counter is stored as long as the dataset is alive.
    """
    key = id(dataset)
    if key not in _passes:
        _passes[key] = Passes()
        weakref.finalize(dataset, _passes.pop, key, None)
    return _passes[key]


def _is_read_without_keras(x: Dataset) -> bool:
    """Returns whether a dataset is read without Keras's adapters.

    This is the case if Keras has no adapter for the dataset, or if creating the
    adapter already reads data. Keras's adapter for a grain `MapDataset` makes
    grain read 500 batches ahead, only to find the shapes of the first batch.
    Its adapter for a torch `DataLoader` starts the loader's workers.
    """
    is_ours = isinstance(x, DistributedDataset | Files | Source)
    return is_ours or is_torch(x) or is_grain_dataset(x)
