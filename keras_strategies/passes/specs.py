"""Specs and collectives of sharded values, and calls that stack values."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
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
      token_parts: The number of cores that share the tokens of a replica's
        sequences.
    """

    sharding: NamedSharding
    dim: int
    sum_dtype: str | None = None
    token_parts: int = 1

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

    def scatter(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of the replicas' values.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """

    def join_cores(self, value: Array, spec: Sharded) -> Array:
        """Gathers a value from the cores that share a replica's sequences."""

    def cut(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of a replicated value.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """

    def note_loop(self) -> None:
        """Notes a loop whose body gathers or scatters."""

    def gather_ids(self, ids: Array) -> Array:
        """Returns the ids of all replicas that share a table's columns.

        Returns:
          An array of shape (the number of shards, *shape).
        """

    def swap(self, value: Array, split: int, stack: int) -> Array:
        """Sends slice i along dimension `split` to the i-th replica.

        Returns:
          The slices that the replicas sent to this one, stacked along dimension
          `stack`.
        """

    def sum_shards(self, shard: Array, spec: Sharded) -> Array:
        """Returns the sum of a shard over the groups of replicas."""


def slice_spec(spec: Sharded) -> Sharded:
    """Returns the spec of a sharded value's slices along dimension 0."""
    sharding = spec.sharding
    sliced = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return dataclasses.replace(spec, sharding=sliced, dim=spec.dim - 1)


def stacked_spec(spec: Sharded) -> Sharded:
    """Returns the spec of values of a spec that are stacked."""
    sharding = spec.sharding
    stacked = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return dataclasses.replace(spec, sharding=stacked, dim=spec.dim + 1)


def _stack(values: Sequence[Array]) -> Array:
    return jnp.stack(values)


def _unstack(stacked: Array) -> list[Array]:
    return list(stacked)


def _split(array: Array, axis: int, size: int) -> Array:
    count, shape = -(-array.shape[axis] // size), list(array.shape)
    pad = np.zeros((array.ndim, 2), int)
    pad[axis, 1] = count * size - shape[axis]
    shape[axis : axis + 1] = count, size
    return jnp.moveaxis(jnp.pad(array, pad).reshape(shape), axis, 0)


def _join(blocks: Array, axis: int, size: int) -> Array:
    shape = list(blocks.shape[1:])
    shape[axis] = -1
    array = jnp.moveaxis(blocks, 0, axis).reshape(shape)
    return jax.lax.slice_in_dim(array, 0, size, axis=axis)


# The interpreter recognizes calls by these names. No function of a user has
# them.
_stack.__name__ = _unstack.__name__ = "ks.stack_values"
_split.__name__, _join.__name__ = "ks.split_blocks", "ks.join_blocks"
# Stacks values of the same shape along a new first dimension, and the inverse.
# If the values are sharded, only the shards are stacked (`ShardedInterpreter`).
stack_values, unstack_values = jax.jit(_stack), jax.jit(_unstack)
# Splits dimension `axis` of an array into blocks of `size`, for a loop, and the
# inverse. The blocks are a new first dimension, and the last one is padded with
# zeros. If another dimension is sharded, only the shards are split.
split_blocks = jax.jit(_split, static_argnums=(1, 2))
join_blocks = jax.jit(_join, static_argnums=(1, 2))


def stacks(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a call of `stack_values`."""
    is_one = len(equation.outvars) == 1 and len(equation.invars) > 1
    return _is_stacking(equation) and is_one


def unstacks(equation: JaxprEqn) -> bool:
    """Returns whether an equation is the transpose of `stack_values`."""
    return _is_stacking(equation) and not stacks(equation)


def find_split(equation: JaxprEqn, spec: Sharded) -> tuple[int, int] | None:
    """Returns the axis and the size with which shards are split or joined.

    Args:
      equation: A call of `split_blocks` or `join_blocks`.
      spec: The spec of the array that is split, or of the joined one.

    Returns:
      None if the dimension is sharded, or the array is no matrix.
    """
    ends: list[Any] = [*equation.outvars, *equation.invars]
    blocks, array = reversed(ends) if joins(equation) else ends
    (_, *shape), whole = blocks.aval.shape, array.aval.shape
    if len(whole) != 2 or shape[spec.dim] != whole[spec.dim]:
        return None
    axis = 1 - spec.dim
    return axis, (whole if joins(equation) else shape)[axis]


def splits(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a call of `split_blocks`."""
    return equation.params.get("name") == _split.__name__


def joins(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a call of `join_blocks`."""
    return equation.params.get("name") == _join.__name__


def _is_stacking(equation: JaxprEqn) -> bool:
    return equation.params.get("name") == _stack.__name__
