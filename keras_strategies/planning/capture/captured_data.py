"""Distributed datasets of a script that is planned: they yield shapes."""

from collections.abc import Iterator
from typing import Any

import jax

from keras_strategies._core import values
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.source import Source
from keras_strategies.keras_bridge.steps.lower_step import shape_of


class PlannedData(DistributedDataset):
    """A distributed dataset whose batches are their shapes.

    Args:
      source: Where the batches come from.
      host: The one device that reads them.
      mesh: The replicas that they are for.
      factor: How many of the source's batches are a global one.
    """

    def __init__(
        self, source: Source, host: ReplicaMesh, mesh: ReplicaMesh, factor: int
    ) -> None:
        super().__init__(source, host)
        self._replicas, self._factor = mesh, factor

    def __iter__(self) -> Any:
        """Nests of values of all replicas, one for each batch."""
        return _Shapes(self, super().__iter__())

    def iterator(self, epoch: int, start: int = 0) -> Any:
        """The same from any place on."""
        return super().iterator(epoch, start)

    def first_shapes(self) -> Any:
        """The shapes of the first global batch."""
        batch = next(iter(super().__iter__()))
        return jax.tree.map(self._global, batch)

    def of_replicas(self, batch: Any) -> Any:
        """What stands for a batch."""
        return jax.tree.map(self._stand_in, batch)

    def _global(self, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = shape_of(leaf)
        rows, *rest = shape.shape
        return jax.ShapeDtypeStruct((rows * self._factor, *rest), shape.dtype)

    def _stand_in(self, leaf: Any) -> values.PerReplica:
        shape, mesh = self._global(leaf), self._replicas
        replicas = mesh.num_replicas
        # As programs are compiled for: with rows that all share evenly.
        rows = max(-(-shape.shape[0] // replicas), 1) * replicas
        array = jax.ShapeDtypeStruct(
            (rows, *shape.shape[1:]), shape.dtype, sharding=mesh.split
        )
        return values.PerReplica.of(array, values.ROWS)


class _Shapes:
    """An iterator over the batches of a `PlannedData`."""

    def __init__(self, data: PlannedData, batches: Any) -> None:
        self._data, self._batches = data, batches

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of a global batch, rows left open (None)."""
        return self._batches.element_spec

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._data.of_replicas(next(self._batches))

    def get_next(self) -> Any:
        """The next batch."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """The next batch, as tf's optional."""
        return self._batches.get_next_as_optional()
