"""Distributed datasets in the loops of models that no strategy holds.

The default strategy distributes a dataset as any other does, and its models
are plain ones of Keras, whose loops have no adapter for it. They are given
one for as long as there is such a dataset.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from keras.src.trainers import data_adapters

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.keras_bridge.inputs.choose_source import source_of_loop
from keras_strategies.keras_bridge.inputs.loop_data import (
    FeedAdapter,
    LoopData,
)
from keras_strategies.keras_bridge.patches import Patches

if TYPE_CHECKING:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter


class PlainFeed(FeedAdapter):
    """Reads a distributed dataset of one replica for Keras's own loops.

    Args:
      dataset: The dataset; each iteration is an epoch.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._begun: tuple[Tree, Iterator[Tree]] | None = None

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Yields batches of host arrays."""
        return (jax.device_get(batch) for batch in self.get_jax_iterator())

    def get_jax_iterator(self, super_batch: object = None) -> Iterator[Tree]:
        """Yields batches on the device; see `Feed.get_jax_iterator`."""
        del super_batch
        begun, self._begun = self._begun, None
        batches = begun[1] if begun else iter(self._dataset)
        for first in [begun[0]] if begun else batches:
            # Keras takes one batch to build a model; it is trained on it, too.
            self._begun = first, batches
            yield first
            self._begun = None
            yield from batches

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._dataset.source.num_batches

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, if known."""
        return self._dataset.source.batch_size


def in_plain_loops(
    dataset: DistributedDataset, mesh: ReplicaMesh
) -> DistributedDataset:
    """Returns a dataset of one replica, which Keras's own loops take.

    Args:
      dataset: The dataset.
      mesh: Its replica.
    """
    held = contextlib.ExitStack()
    held.enter_context(_patches.hold())
    weakref.finalize(dataset, held.close)
    _meshes[dataset] = mesh
    return dataset


_meshes: weakref.WeakKeyDictionary[DistributedDataset, ReplicaMesh]
_meshes = weakref.WeakKeyDictionary()


def _adapting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_data_adapter(
        x: Dataset, *args: Any, **kwargs: Any
    ) -> "DataAdapter":
        mesh = _meshes.get(x) if isinstance(x, DistributedDataset) else None
        if mesh is None:
            return original(x, *args, **kwargs)
        given = LoopData(x=x, **kwargs)
        source = source_of_loop(mesh, given, name="fit", facts={})
        return PlainFeed(DistributedDataset(source, mesh))

    return get_data_adapter


_patches = Patches(lambda: [(data_adapters, "get_data_adapter", _adapting)])
