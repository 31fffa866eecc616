"""The choice of the source that reads a user's data."""

import dataclasses
import functools
import sys
import warnings
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
    is_torch_dataloader,
)
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDataset,
    PyDatasetAdapter,
)
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from keras_strategies._core.host_arrays import check_numbers
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.grain.grain_data import GrainSource
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import Cut, Part, Passes, Source
from keras_strategies.data.sources import iterables
from keras_strategies.data.sources.file_source import FilesSource
from keras_strategies.data.sources.files import Files
from keras_strategies.data.sources.numpy_dataset import NumpyDataset, RowsSource
from keras_strategies.data.sources.torch_data import TorchSource
from keras_strategies.data.tfdata.tf_data import TfDataSource
from keras_strategies.keras_bridge.inputs.agree_source import made_together
from keras_strategies.keras_bridge.inputs.keras_sources import (
    AdapterSource,
    ArraySource,
    PyDatasetSource,
)
from keras_strategies.keras_bridge.inputs.loop_data import LoopData


def source_of_loop(
    mesh: ReplicaMesh, given: LoopData, *, name: str, facts: dict[str, Any]
) -> Source:
    """The source of what was given to `fit` and its like. Collective.

    Raises:
      ValueError: arguments that do not go together, as in Keras.
      RuntimeError: they do not in another process.
    """
    choose = functools.partial(_of_loop, mesh, given=given)
    draws = _draws_orders(given.x)
    return made_together(mesh, f"`{name}`", choose, facts, draws=draws)


def source_of_dataset(
    dataset: Dataset,
    mesh: ReplicaMesh,
    *,
    policy: AutoShardPolicy | None = None,
) -> Source:
    """The source of a dataset that yields batches. Collective.

    Args:
      dataset: The dataset.
      mesh: The replicas.
      policy: How several processes share it; None for what it says itself.

    Raises:
      TypeError: not a dataset.
      ValueError: a policy that the dataset has no use for.
      RuntimeError: another process cannot read its dataset.
    """
    choose = functools.partial(local_source, dataset, mesh, policy=policy)
    name = "`experimental_distribute_dataset`"
    return made_together(mesh, name, choose, draws=_draws_orders(dataset))


def local_source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    seed: int,
    *,
    policy: AutoShardPolicy | None = None,
    batch_size: int | None = None,
    shuffle: bool = False,
) -> Source:
    """What this process reads of a dataset; the others are not asked.

    Args:
      dataset: The dataset.
      mesh: The replicas.
      seed: The orders', where the dataset has none. The same in all
        processes.
      policy: See `source_of_dataset`.
      batch_size: For torch datasets without a loader.
      shuffle: For those, too.

    Raises:
      TypeError: not a dataset.
      ValueError: a policy that the dataset has no use for.
    """
    places: dict[str, Any] = {
        "num_processes": mesh.num_readers,
        "process_index": mesh.reader_index,
        "seed": seed,
    }
    if is_tf_dataset(dataset):
        copy = mesh.place_among_readers if mesh.spans_processes else None
        return TfDataSource(dense(dataset), policy=policy, copy=copy, **places)
    chosen = AutoShardPolicy.AUTO if policy is None else policy
    if isinstance(dataset, Source):
        if chosen is not AutoShardPolicy.AUTO:
            raise ValueError(
                "A `ks.data.Source` decides itself what each process reads. "
                f"Received: `AutoShardPolicy.{chosen.name}` beside one. Leave "
                "the policy out, or set the source's `is_process_local`."
            )
        return dataset
    if isinstance(dataset, Files):
        return FilesSource(dataset, policy=chosen, **places)
    if _is_torch(dataset):
        alone = {"batch_size": batch_size, "shuffle": shuffle}
        return TorchSource(dataset, policy=chosen, **alone, **places)
    if is_grain_dataset(dataset):
        return GrainSource(dataset, policy=chosen, **places)
    return _source_of_batches(dataset, mesh, chosen)


def _source_of_batches(
    dataset: Dataset, mesh: ReplicaMesh, chosen: AutoShardPolicy
) -> Source:
    """What every process reads of arrays, a `PyDataset` or an iterable."""
    is_process_local = mesh.num_readers > 1 and chosen is AutoShardPolicy.OFF
    if chosen in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        raise ValueError(
            f"`{chosen.name}` is a policy for datasets that read files with "
            f"tf.data or `ks.data.files`. Received: an object of type "
            f"{type(dataset).__name__}. Use AUTO, DATA or OFF."
        )
    if isinstance(dataset, NumpyDataset) and not is_process_local:
        return RowsSource(dataset)
    shared = {
        "is_process_local": is_process_local,
        "has_checksums": mesh.num_processes > 1,
    }
    if isinstance(dataset, PyDataset):
        return PyDatasetSource(PyDatasetAdapter(dataset), **shared)
    return iterables.IterableSource(dataset, **shared)


def _of_loop(mesh: ReplicaMesh, seed: int, *, given: LoopData) -> Source:
    for array in tree.flatten((given.x, given.y, given.sample_weight)):
        if isinstance(array, np.ndarray):
            check_numbers(array)
    if _is_read_without_keras(given.x):
        source = _of_dataset(mesh, seed, given)
        return _weighted(source, given.class_weight)
    adapter: Any = get_data_adapter(**vars(given))
    if type(adapter) is ArrayDataAdapter:
        return ArraySource(adapter)
    if isinstance(adapter, PyDatasetAdapter):
        return PyDatasetSource(adapter, has_checksums=mesh.num_processes > 1)
    if isinstance(adapter, TFDatasetAdapter):
        source = local_source(given.x, mesh, seed)
        source.passes = _passes_of(given.x)
        _check_ends(source, given.steps_per_epoch)
        return _weighted(source, given.class_weight)
    is_generator = isinstance(adapter, GeneratorDataAdapter)
    return AdapterSource(
        adapter,
        kind="a generator" if is_generator else "a dataset",
        has_checksums=mesh.num_processes > 1,
        is_copied=is_generator,
    )


def _of_dataset(mesh: ReplicaMesh, seed: int, given: LoopData) -> Source:
    """The source of a dataset that Keras has no adapter for."""
    x, shuffle = given.x, given.shuffle
    if given.y is not None or given.sample_weight is not None:
        raise ValueError(
            "A dataset yields targets and sample weights itself. "
            f"Received: `y` or `sample_weight` beside x of type "
            f"{type(x).__name__}. Let it yield (x, y, sample_weight)."
        )
    if isinstance(x, DistributedDataset):
        source = x.source
    else:
        size = given.batch_size
        source = local_source(
            x, mesh, seed, batch_size=size, shuffle=bool(shuffle)
        )
        source.passes = _passes_of(x)
    _check_ends(source, given.steps_per_epoch)
    if shuffle and (is_grain_dataset(x) or is_torch_dataloader(x)):
        warnings.warn(
            "`shuffle=True` was passed, but is ignored: a "
            f"{type(x).__name__} has an order of its own.",
            stacklevel=2,
        )
    return source


class _Weighted:
    """A source whose rows are given the weights of their classes.

    In all else it is the source that it is made of.
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
                    "`class_weight` is for data of inputs and one target, "
                    "without sample weights. Received: batches of "
                    f"{len(data)} entries. Multiply the class weights into "
                    "the sample weights."
                )
            weight = data_adapter_utils.class_weight_to_sample_weights(
                data[1], self._class_weight
            )
            data = (*data, np.asarray(weight))
            yield dataclasses.replace(part, data=data)


def _weighted(source: Source, class_weight: dict[int, float] | None) -> Source:
    if not class_weight:
        return source
    return cast(Source, _Weighted(source, class_weight))


def _check_ends(source: Source, steps_per_epoch: int | None) -> None:
    if source.is_infinite and not steps_per_epoch:
        raise ValueError(
            "An epoch of an infinite dataset needs an end. Received: a "
            "dataset that repeats for ever, and no number of steps. Pass "
            "`steps_per_epoch` (to evaluate and predict: `steps`), or leave "
            "`.repeat()` out."
        )


def dense(dataset: Dataset) -> Dataset:
    """Returns a dataset; one of tf.data with its sparse elements made dense.

    Returns:
      A dataset of the same elements.
    """
    if not is_tf_dataset(dataset):
        return dataset
    tensorflow = sys.modules["tensorflow"]

    def dense_leaf(leaf: Tree) -> Tree:
        is_sparse = isinstance(leaf, tensorflow.SparseTensor)
        return tensorflow.sparse.to_dense(leaf) if is_sparse else leaf

    def made_dense(*element: Tree) -> Tree:
        made = tensorflow.nest.map_structure(dense_leaf, element)
        return made if len(made) > 1 else made[0]

    specs = tensorflow.nest.flatten(dataset.element_spec)
    if any(isinstance(s, tensorflow.SparseTensorSpec) for s in specs):
        return dataset.map(made_dense)
    return dataset


def _draws_orders(x: Dataset) -> bool:
    """Whether a dataset may ask us for the seed of its shuffling."""
    return isinstance(x, Files) or is_tf_dataset(x) or _is_torch(x)


# Of datasets whose orders depend on the number of the pass, by their ids.
_passes: dict[int, Passes] = {}


def _passes_of(dataset: Dataset) -> Passes:
    """The passes over a dataset, counted for as long as it lives."""
    key = id(dataset)
    if key not in _passes:
        _passes[key] = Passes()
        weakref.finalize(dataset, _passes.pop, key, None)
    return _passes[key]


def _is_read_without_keras(x: Dataset) -> bool:
    """Whether Keras has no adapter for it, or one that reads it at once.

    That of a grain `MapDataset` lets grain read 500 batches ahead, for the
    shapes of the first; that of a torch loader starts its workers.
    """
    is_ours = isinstance(x, DistributedDataset | Files | Source)
    return is_ours or _is_torch(x) or is_grain_dataset(x)


def _is_torch(x: Dataset) -> bool:
    return _is_torch_dataset(x) or is_torch_dataloader(x)


def _is_torch_dataset(value: Dataset) -> bool:
    """Whether it is a dataset of torch that any row can be asked of."""
    torch = sys.modules.get("torch.utils.data")
    return (
        torch is not None
        and isinstance(value, torch.Dataset)
        and hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
    )
