"""Distributed datasets as the data of plain Keras models.

The default strategy distributes datasets as other strategies do. But its models
are plain Keras models, and Keras has no data adapter for a distributed dataset.
While such a dataset exists, a patch adds the adapter.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from keras.src.trainers import data_adapters

from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.fit.inputs.choose_source import make_loop_source
from keras_strategies.fit.inputs.loop_data import (
    FeedAdapter,
    LoopData,
)
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.spmd.mesh import ReplicaMesh

if TYPE_CHECKING:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter


class PlainFeed(FeedAdapter):
    """A Keras data adapter for a distributed dataset with one replica.

    Args:
      dataset: The dataset. Each iteration over it is an epoch.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._started: tuple[Tree, Iterator[Tree]] | None = None

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Yields batches as host arrays."""
        return (jax.device_get(batch) for batch in self.get_jax_iterator())

    def get_jax_iterator(self, super_batch: object = None) -> Iterator[Tree]:
        """Yields batches on the device; see `Feed.get_jax_iterator`."""
        del super_batch
        started, self._started = self._started, None
        batches = started[1] if started else iter(self._dataset)
        for first in [started[0]] if started else batches:
            # Keras reads one batch to build the model. This batch is stored, so
            # that the next iterator yields it again for training.
            self._started = first, batches
            yield first
            self._started = None
            yield from batches

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._dataset.source.num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a batch, if known."""
        return self._dataset.source.batch_size


def adapt_to_plain_loops(
    dataset: DistributedDataset, mesh: ReplicaMesh
) -> DistributedDataset:
    """Makes plain Keras models accept a distributed dataset with one replica.

    Args:
      dataset: The dataset. The patch is removed when the dataset is deleted.
      mesh: The mesh, which has one replica.

    Returns:
      `dataset`.
    """
    patched = contextlib.ExitStack()
    patched.enter_context(_patches.hold())
    weakref.finalize(dataset, patched.close)
    _meshes[dataset] = mesh
    return dataset


_meshes: weakref.WeakKeyDictionary[DistributedDataset, ReplicaMesh]
_meshes = weakref.WeakKeyDictionary()


def _add_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_data_adapter(
        x: Dataset, *args: Any, **kwargs: Any
    ) -> "DataAdapter":
        mesh = _meshes.get(x) if isinstance(x, DistributedDataset) else None
        if mesh is None:
            return original(x, *args, **kwargs)
        data = LoopData(x=x, **kwargs)
        source = make_loop_source(mesh, data, name="fit", facts={})
        return PlainFeed(DistributedDataset(source, mesh))

    return get_data_adapter


_patches = Patches(lambda: [(data_adapters, "get_data_adapter", _add_adapter)])
