"""Names of the replicas' axes, and specs and collectives of sharded values."""

import dataclasses
from typing import Protocol

from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies._types import Array

Axis = str | tuple[str, ...]
"""The replica axis, or two axes: over groups, and within a group."""


@dataclasses.dataclass(frozen=True)
class OverCores:
    """The placement of a value sharded over the cores of each replica.

    Attributes:
      sharding: The sharding of the value.
    """

    sharding: NamedSharding

    @property
    def spec(self) -> PartitionSpec:
        """The spec in a mapped function, where the value is replicated."""
        return PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The placement of a value sharded over the replicas.

    The function that a replica computes sees the full value.

    Attributes:
      sharding: The sharding of the value. It may also shard another dimension
        over a replica's cores.
      dim: The dimension of the value that is sharded over the replicas.
      sum_dtype: The dtype in which values (gradients) are summed over the
        replicas. None for the dtype of the value.
    """

    sharding: NamedSharding
    dim: int
    sum_dtype: str | None = None

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the shards in a function mapped over the replicas."""
        axis = self.sharding.spec[self.dim]
        return PartitionSpec(*[None] * self.dim, axis)

    @property
    def count(self) -> int:
        """The number of shards."""
        return self.sharding.mesh.shape[self.sharding.spec[self.dim]]


Placed = OverCores | Sharded
"""The placement of a value that is not replicated on all devices."""

Spec = PartitionSpec | Placed
"""A partition spec for `replica_map`, or the placement of a sharded value."""


class Exchange(Protocol):
    """The collectives that gather and scatter sharded values."""

    def gather(self, shard: Array, spec: Sharded) -> Array:
        """Gathers a value from the replicas' shards.

        Returns:
          An array of the value's shape.
        """
        ...

    def scatter(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of the replicas' values.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        ...

    def cut(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of a replicated value.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        ...

    def note_loop(self) -> None:
        """Notes a loop whose body gathers or scatters."""
        ...

    def gather_ids(self, ids: Array) -> Array:
        """Returns the ids of all replicas that share a table's columns.

        Returns:
          An array of shape (the number of shards, *shape).
        """
        ...

    def swap(self, value: Array, split: int, stack: int) -> Array:
        """Sends slice i along dimension `split` to the i-th replica.

        Returns:
          The slices that the replicas sent to this one, stacked along dimension
          `stack`.
        """
        ...

    def sum_shards(self, shard: Array, spec: Sharded) -> Array:
        """Returns the sum of a shard over the groups of replicas."""
        ...
