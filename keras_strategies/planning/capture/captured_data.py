"""Distributed datasets for a planned script; they yield shapes, not arrays."""

from collections.abc import Callable
from typing import Any

import jax

from keras_strategies._types import Array, Batch
from keras_strategies.planning.compile.step import with_rows
from keras_strategies.planning.seam import (
    Call,
    ReplicaMesh,
    Source,
    distributed,
    get_shape,
    make_feed,
    values,
)

_DATA = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")


class CapturedData(distributed.DistributedDataset):
    """A distributed dataset that yields shapes in place of arrays.

    Args:
      source: The source of the batches.
      host: A mesh of one CPU device, on which the batches are read.
      mesh: The replicas of the planned slice, among which batches are divided.
      factor: The number of batches from `source` that form one global batch.
    """

    def __init__(
        self, source: Source, host: ReplicaMesh, mesh: ReplicaMesh, factor: int
    ) -> None:
        super().__init__(source, host)
        self._replicas, self._factor = mesh, factor

    def iterator(self, epoch: int, start: int = 0) -> "_ShapeIterator":
        """Returns an iterator over batches that contain shapes, not values."""
        return _ShapeIterator(super().iterator(epoch, start), self._stand_in)

    def first_shapes(self) -> Batch:
        """Returns the shapes of the first batch.

        Returns:
          A `jax.ShapeDtypeStruct` for each array of the global batch.
        """
        batch = next(super().iterator(self.source.passes.next))
        return times_rows(batch, self._factor)

    def _stand_in(self, leaf: Array) -> values.PerReplica:
        shape, mesh = times_rows(leaf, self._factor), self._replicas
        replicas = mesh.num_replicas
        # The number of rows is rounded up to a multiple of the number of
        # replicas, because programs are compiled for such numbers.
        rows = max(-(-shape.shape[0] // replicas), 1) * replicas
        array = jax.ShapeDtypeStruct(
            (rows, *shape.shape[1:]), shape.dtype, sharding=mesh.split
        )
        return values.PerReplica.of(array, values.ROWS)


class _ShapeIterator(distributed.DistributedIterator):
    """An iterator that yields the shapes of another iterator's batches."""

    def __init__(
        self,
        batches: distributed.DistributedIterator,
        stand_in: Callable[[Any], Any],
    ) -> None:
        super().__init__(batches._steps, *batches._place)
        self._stand_in = stand_in

    def __next__(self) -> Batch:
        return jax.tree.map(self._stand_in, super().__next__())


def read_first_batch(call: Call, host: ReplicaMesh) -> tuple[Any, int | None]:
    """Reads the first batch of a call of `fit`, `evaluate` or `predict`.

    Args:
      call: The call.
      host: A mesh of one CPU device.

    Returns:
      The batch (for `CapturedData` its shapes), and the number of batches of
      the call or of an epoch; None if it is unknown.
    """
    steps = call["steps_per_epoch" if call.name == "fit" else "steps"]
    if isinstance(call["x"], CapturedData):
        return call["x"].first_shapes(), steps or call["x"].source.num_batches
    data = {name: call[name] for name in _DATA}
    feed = make_feed(host, **data, steps_per_epoch=steps, name=call.name)
    return next(iter(feed.get_numpy_iterator())), steps or feed.num_batches


def times_rows(batch: Batch, factor: int) -> Batch:
    """Returns a batch's shapes, with its row count multiplied by `factor`."""
    return jax.tree.map(
        lambda leaf: with_rows(leaf, get_shape(leaf).shape[0] * factor), batch
    )
