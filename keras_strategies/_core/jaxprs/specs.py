"""Axes of replicas, and specs of values that they hold shards of."""

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

Axis = str | tuple[str, ...]
"""The replica axis, or the axes (of the groups, within a group)."""


@dataclasses.dataclass(frozen=True)
class OverCores:
    """The placement of a value sharded over the cores of each replica.

    Attributes:
      sharding: The sharding of the value.
    """

    sharding: NamedSharding

    @property
    def spec(self) -> PartitionSpec:
        """The spec in a function mapped over replicas: replicated."""
        return PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The placement of a value sharded over the replicas.

    A replica's function sees the full value.

    Attributes:
      sharding: The sharding of the value. It may also shard another dimension
        over a replica's cores.
      dim: The dimension that is sharded over the replicas.
      sum_dtype: The dtype in which the replicas' values are summed; None for
        the dtype of the value.
    """

    sharding: NamedSharding
    dim: int
    sum_dtype: str | None = None

    @property
    def spec(self) -> PartitionSpec:
        """The spec of its shards in a function mapped over the replicas."""
        axis = self.sharding.spec[self.dim]
        return PartitionSpec(*[None] * self.dim, axis)


Placed = OverCores | Sharded
"""The placement of a value that is not replicated on all devices."""

Spec = PartitionSpec | Placed
"""A spec of `replica_map`, or the placement of a sharded value."""
