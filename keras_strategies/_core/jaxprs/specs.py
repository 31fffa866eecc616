"""Axes of replicas, and specs of values that they hold shards of."""

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

Axis = str | tuple[str, ...]
"""The replicas' axis, or the axes of their groups and in one."""


@dataclasses.dataclass(frozen=True)
class Divided:
    """Where a value lies that is whole to a replica's function.

    Attributes:
      sharding: Its sharding.
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


Spec = PartitionSpec | Divided
"""As in `replica_map`, or of a divided value."""
