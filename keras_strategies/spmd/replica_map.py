"""Maps functions over the replicas of a mesh; implements collectives.

Only this module uses `jax.shard_map`. `check_vma` is off: Keras layers do not
trace under it, and it would sum gradients of replicated weights implicitly
(docs/decisions/01-mapped-programs.md). Without this check, JAX does not notice
if the replicas' copies of a replicated array differ, so the tests compare all
copies of every replicated array.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies._types import Array, Tree
from keras_strategies.passes import replay, stages
from keras_strategies.passes.constrained_operations import constrain_function
from keras_strategies.passes.lockstep import Turn
from keras_strategies.passes.specs import Axis
from keras_strategies.spmd.buffers import sum_arrays
from keras_strategies.spmd.mesh import ReplicaMesh


def replica_map(
    fn: Callable[..., Tree],
    mesh: ReplicaMesh,
    *,
    in_specs: Tree,
    out_specs: Tree,
    is_rearranged: bool = False,
) -> Callable[..., Tree]:
    """Maps `fn` over the replicas with `jax.shard_map`; traces it only once.

    Args:
      fn: The function that each replica computes.
      mesh: The replicas.
      in_specs: The specs of the arguments.
      out_specs: The specs of the results.
      is_rearranged: Whether the mapped function is only traced, and its parts
        are mapped later.
    """
    if mesh.cores_per_replica > 1 and not is_rearranged:
        fn = constrain_function(fn, (mesh.model_axis,))
    return jax.shard_map(
        fn,
        mesh=mesh.mesh,
        axis_names=set(mesh.replica_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def core_map(
    fn: Callable[..., Tree],
    mesh: ReplicaMesh,
    *,
    in_specs: Tree,
    out_specs: Tree,
    is_global: bool = False,
) -> Callable[..., Tree]:
    """Maps `fn` over the cores of a replica, because XLA cannot partition it.

    Args:
      fn: A function of one core's parts.
      mesh: The replicas.
      in_specs: The specs of its operands, over the model axis.
      out_specs: The specs of its results.
      is_global: Whether `fn` is mapped over the replicas, too, because the
        trace is not a replica's.
    """
    axes = set(mesh.replica_axes) if is_global else set()
    if mesh.cores_per_replica > 1:
        axes.add(mesh.model_axis)
    is_mapped = bool(jax.sharding.get_abstract_mesh().axis_names)
    return jax.shard_map(
        fn,
        mesh=None if is_mapped else mesh.mesh,
        axis_names=axes,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def split_tokens(values: Tree, mesh: ReplicaMesh) -> Tree:
    """Shards arrays over a replica's cores along dimension 1, the tokens.

    Arrays without that dimension, or whose tokens the cores cannot share
    evenly, are returned as they are, and so are all if cores share no sequence.
    """
    if not mesh.context_parallel or mesh.cores_per_replica == 1:
        return values
    is_mapped = bool(jax.sharding.get_abstract_mesh().axis_names)

    def split(array: Array) -> Array:
        if array.ndim < 2 or array.shape[1] % mesh.cores_per_replica:
            return array
        dims: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
        dims[1] = mesh.model_axis
        spec = PartitionSpec(*dims)
        return jax.lax.with_sharding_constraint(
            array, spec if is_mapped else NamedSharding(mesh.mesh, spec)
        )

    return jax.tree.map(split, values)


def replicated_spec() -> PartitionSpec:
    """Returns the partition spec of a replicated value."""
    return PartitionSpec()


def split_spec(mesh: ReplicaMesh, *, dim: int = 0) -> PartitionSpec:
    """Returns the spec that splits dimension `dim` over the replicas."""
    return PartitionSpec(*[None] * dim, mesh.all_replicas)


def add_dim(array: Array, mesh: ReplicaMesh) -> jax.Array:
    """Adds the replica dimension, of size 1, in a mapped program."""
    return _hide(jnp.asarray(array), mesh)[None]


def drop_dim(array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Removes the replica dimension, of size 1, in a mapped program."""
    return _hide(array[0], mesh)


def _hide(array: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Keeps XLA on CPU from moving a dimension of size 1 past operations.

    XLA (jax 0.10 to 0.12) moves it past the update of an array by a slice of
    itself. The update then reads entries that it has written
    (https://github.com/openxla/xla/issues/49176).
    """
    if mesh.platform != "cpu" or not array.ndim:
        return array
    return jax.lax.optimization_barrier(array)


def replica_id(axis: Axis) -> jax.Array | int:
    """Returns the id of the calling replica.

    It is a traced int32 in a mapped program. It is an int if replicas run in
    lockstep, or in a replay with `Alone`.
    """
    side = replay.current.side
    if isinstance(side, Turn | replay.Alone):
        return side.replica
    return jax.lax.axis_index(axis)


def all_sum(
    leaves: Sequence[jax.Array], axis: Axis, sum_dtype: str | None = None
) -> list[jax.Array]:
    """Sums each array over the replicas.

    Args:
      leaves: This replica's arrays, of any shapes and dtypes.
      axis: The replica axis.
      sum_dtype: The dtype in which arrays are sent and summed. None for the
        dtype of each array.

    Returns:
      The sums, in the order and with the shapes of `leaves`.

    References:
      XLA computes the sum as a reduce-scatter followed by an all-gather, as in
      Rabenseifner, Optimization of Collective Reduction Operations (ICCS 2004).
    """
    if not leaves:
        return []
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    reduce = functools.partial(sum_arrays, axis=axis)
    if sum_dtype is None:
        return _compute_collective(reduce, arrays)
    sums = _compute_collective(reduce, [a.astype(sum_dtype) for a in arrays])
    return [s.astype(a.dtype) for s, a in zip(sums, arrays, strict=True)]


def sum_if(
    condition: Array,
    compute: Callable[..., list[jax.Array]],
    operands: Sequence[Tree],
    axis: Axis,
    sum_dtype: str | None = None,
) -> list[jax.Array]:
    """Computes arrays, and sums them over the replicas if a condition holds.

    Args:
      condition: A boolean scalar, which must be equal on all replicas: those
        that take the other branch send nothing.
      compute: A function from `operands` to a list of arrays.
      operands: The arguments of `compute`: nests of arrays.
      axis: The replica axis.
      sum_dtype: See `all_sum`.

    Returns:
      The sums of the arrays, or this replica's arrays.
    """

    def compute_sums(*operands: Tree) -> list[jax.Array]:
        return all_sum(compute(*operands), axis, sum_dtype)

    def branch(condition: Array, *operands: Tree) -> list[jax.Array]:
        return jax.lax.cond(condition, compute_sums, compute, *operands)

    # By this name, passes know that the branch is safe.
    branch.__name__ = stages.SUM_IF
    return jax.jit(branch)(condition, *operands)


def all_max(leaf: jax.Array, axis: Axis) -> jax.Array:
    """Computes the elementwise maximum over the replicas."""
    return _one(lambda a: jax.lax.pmax(a, axis), leaf)


def all_min(leaf: jax.Array, axis: Axis) -> jax.Array:
    """Computes the elementwise minimum over the replicas."""
    return _one(lambda a: jax.lax.pmin(a, axis), leaf)


def all_mean(leaf: jax.Array, axis: Axis) -> jax.Array:
    """Computes the mean over the replicas; differentiable."""
    return _one(lambda a: jax.lax.pmean(a, axis), leaf)


def all_concatenate(leaf: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Concatenates the replicas' arrays along `dim`; differentiable.

    The default dimension is that of the rows.

    The arrays must have the same shape, with one exception: while replicas with
    different numbers of rows are replayed or run in lockstep (see `replay` and
    `lockstep`), the sizes in dimension `dim` may differ.
    """
    return _compute_collective(replay.Concatenation(axis, dim), [leaf])[0]


def as_number(array: Array) -> Array:
    """Converts booleans to int32, so that they can be summed and compared.

    Returns:
      An array of the same shape, of dtype int32 for booleans.
    """
    return array.astype("int32") if array.dtype == bool else array


def keep_first(array: Array, axis: Axis) -> jax.Array:
    """Returns the array on replica 0, and zeros on all other replicas.

    The sum over the replicas is then replica 0's array.
    """
    is_first = replica_id(axis) == 0
    return jnp.where(is_first, array, jnp.zeros_like(array))


def _compute_collective(
    reduce: replay.Reduce, operands: list[Any]
) -> list[Any]:
    """Computes a collective, with this thread's `Side` if set, else with JAX.

    Args:
      reduce: A function that computes the collective with JAX.
      operands: This replica's arrays.

    Returns:
      This replica's results.
    """
    side = replay.current.side
    if side is None:
        return reduce(operands)
    return side.collective(reduce, [jnp.asarray(o) for o in operands])


def _one(reduce: Callable[[Any], Any], leaf: Array) -> Array:
    return _compute_collective(lambda leaves: [reduce(leaves[0])], [leaf])[0]
