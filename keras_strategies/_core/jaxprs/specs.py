"""Axes of replicas, and specs of values that they hold shards of."""

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

Axis = str | tuple[str, ...]
"""The replicas' axis, or the axes of their groups and in one."""


@dataclasses.dataclass(frozen=True)
class OverCores:
    """Where a value lies that each replica holds, divided over its cores.

    Attributes:
      sharding: Its sharding.
    """

    sharding: NamedSharding

    @property
    def spec(self) -> PartitionSpec:
        """What of it a function that is mapped over the replicas is given."""
        return PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Where a value lies that is whole to a replica's function.

    Attributes:
      sharding: Its sharding, which may also divide another dimension over a
        replica's cores.
      dim: The dimension that is divided over replicas.
      sum_dtype: The dtype in which the replicas' values are summed; None for
        their own.
    """

    sharding: NamedSharding
    dim: int
    sum_dtype: str | None = None

    @property
    def spec(self) -> PartitionSpec:
        """Its shards in a function that is mapped over the replicas."""
        axis = self.sharding.spec[self.dim]
        return PartitionSpec(*[None] * self.dim, axis)


Placed = OverCores | Sharded
"""Of a value that some device does not hold whole."""

Spec = PartitionSpec | Placed
"""As in `replica_map`, or of a value that is placed in another way."""
