"""Names of the replicas' axes, and specs of sharded values."""

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

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


Placed = OverCores | Sharded
"""The placement of a value that is not replicated on all devices."""

Spec = PartitionSpec | Placed
"""A partition spec for `replica_map`, or the placement of a sharded value."""
