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
from jax.sharding import PartitionSpec

from keras_strategies._types import Array, Tree
from keras_strategies.passes import replay, stages
from keras_strategies.passes.constrained_operations import constrain_function
from keras_strategies.passes.lockstep import Turn
from keras_strategies.passes.specs import Axis, Sharded
from keras_strategies.spmd.buffers import Buffering, sum_arrays
from keras_strategies.spmd.dispatch import keep_out_of_cache
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.scatter_blocks import find_block


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
    is_global: bool,
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


class ShardExchange:
    """The collectives that gather and scatter sharded values.

    See `sharded_values`. If replicas have several cores, each core sends only
    its own part of the array. Without this, XLA would first gather the array
    over the cores and then send replicated arrays.

    Args:
      mesh: The replicas.
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._mesh = mesh

    def gather(self, shard: jax.Array, spec: Sharded) -> jax.Array:
        """Gathers a value from the replicas' shards."""
        axis = self._mesh.axis

        def gather(part: jax.Array) -> jax.Array:
            return jax.lax.all_gather(part, axis, axis=spec.dim, tiled=True)

        return self._by_core(gather, spec)(shard)

    def scatter(self, value: jax.Array, spec: Sharded) -> jax.Array:
        """Returns this replica's shard of the sum of the replicas' values."""

        def scatter(part: jax.Array) -> jax.Array:
            sent = part.astype(spec.sum_dtype or part.dtype)
            shard = self._sum_groups(self._scatter_in_group(sent, spec))
            return shard.astype(part.dtype)

        return self._by_core(scatter, spec)(value)

    def gather_ids(self, ids: jax.Array) -> jax.Array:
        """Returns the ids of all replicas that share a table's columns."""

        def gather(ids: jax.Array) -> jax.Array:
            return jax.lax.all_gather(ids, self._mesh.axis)

        return self._by_core(gather, None)(ids)

    def swap(self, value: jax.Array, split: int, stack: int) -> jax.Array:
        """Sends slice i along dimension `split` to the i-th replica."""

        def swap(value: jax.Array) -> jax.Array:
            # The first dimension is split and stacked, so that XLA chooses when
            # to transpose.
            first = jnp.moveaxis(value, split, 0)
            received = jax.lax.all_to_all(first, self._mesh.axis, 0, 0)
            return jnp.moveaxis(received, 0, stack)

        return self._by_core(swap, None)(value)

    def sum_shards(self, shard: jax.Array, spec: Sharded) -> jax.Array:
        """Returns the sum of a shard over the groups of replicas."""

        def add_up(part: jax.Array) -> jax.Array:
            sent = part.astype(spec.sum_dtype or part.dtype)
            return self._sum_groups(sent).astype(part.dtype)

        return self._by_core(add_up, spec)(shard)

    def _sum_groups(self, value: jax.Array) -> jax.Array:
        groups = self._mesh.replica_axes[:-1]
        return jax.lax.psum(value, groups) if groups else value

    def _scatter_in_group(self, value: jax.Array, spec: Sharded) -> jax.Array:
        mesh, dim = self._mesh, spec.dim
        if mesh.platform == "cpu" and mesh.num_processes > 1:
            # Between processes, reduce-scatters on CPUs may return wrong sums,
            # and give up after 30 seconds (docs/upstream.md).
            return self.cut(jax.lax.psum(value, mesh.axis), spec)
        count = jax.lax.axis_size(mesh.axis)
        block = None
        if mesh.platform == "tpu":
            block = find_block(value.shape, dim, count)
        if block is None:
            return jax.lax.psum_scatter(
                value, mesh.axis, scatter_dimension=dim, tiled=True
            )
        rows, columns = value.shape[0] // count, value.shape[1]
        value = value.reshape(count, rows, columns)
        if block != (rows, columns):
            more = block[0] - rows, block[1] - columns
            value = jnp.pad(value, [(0, 0), *((0, n) for n in more)])
        shard = jax.lax.psum_scatter(
            value, mesh.axis, scatter_dimension=dim, tiled=False
        )
        return shard[:rows, :columns]

    def cut(self, value: jax.Array, spec: Sharded) -> jax.Array:
        """Returns this replica's shard of a replicated value."""
        size = value.shape[spec.dim] // jax.lax.axis_size(self._mesh.axis)
        start = jax.lax.axis_index(self._mesh.axis) * size
        return jax.lax.dynamic_slice_in_dim(value, start, size, spec.dim)

    def note_loop(self) -> None:
        """Keeps a program out of JAX's cache on disk, on CPU devices."""
        keep_out_of_cache(self._mesh)

    def _by_core(
        self, fn: Callable[[jax.Array], jax.Array], spec: Sharded | None
    ) -> Callable[[jax.Array], jax.Array]:
        """Maps a function over a replica's cores and their parts of an array.

        Args:
          fn: A function that works entry by entry along the dimension that is
            sharded over the cores.
          spec: The spec of the array; None if each core has all of it.
        """
        if self._mesh.cores_per_replica == 1:
            return fn
        model = self._mesh.model_axis
        axes: list[str | None] = []
        if spec is not None:
            axes = [a if a == model else None for a in spec.sharding.spec]
        cores = PartitionSpec(*axes)
        return jax.shard_map(
            fn,
            axis_names={model},
            in_specs=cores,
            out_specs=cores,
            check_vma=False,
        )


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
    leaves: Sequence[jax.Array],
    axis: Axis,
    buffering: Buffering | None = None,
    sum_dtype: str | None = None,
) -> list[jax.Array]:
    """Sums each array over the replicas.

    Args:
      leaves: This replica's arrays, of any shapes and dtypes.
      axis: The replica axis.
      buffering: The rule that decides which arrays share a buffer. None for no
        buffers.
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
    if isinstance(replay.current.side, Turn):
        # In lockstep, sums are computed eagerly, op by op, so a buffer would
        # only add work.
        buffering = None
    reduce = functools.partial(sum_arrays, axis=axis, buffering=buffering)
    if sum_dtype is None:
        return _compute_collective(reduce, arrays)
    sums = _compute_collective(reduce, [a.astype(sum_dtype) for a in arrays])
    return [s.astype(a.dtype) for s, a in zip(sums, arrays, strict=True)]


def sum_if(
    condition: Array,
    compute: Callable[..., list[jax.Array]],
    operands: Sequence[Tree],
    axis: Axis,
    buffering: Buffering | None = None,
    sum_dtype: str | None = None,
) -> list[jax.Array]:
    """Computes arrays, and sums them over the replicas if a condition holds.

    Args:
      condition: A boolean scalar, which must be equal on all replicas: those
        that take the other branch send nothing.
      compute: A function from `operands` to a list of arrays.
      operands: The arguments of `compute`: nests of arrays.
      axis: The replica axis.
      buffering: See `all_sum`.
      sum_dtype: See `all_sum`.

    Returns:
      The sums of the arrays, or this replica's arrays.
    """

    def compute_sums(*operands: Tree) -> list[jax.Array]:
        return all_sum(compute(*operands), axis, buffering, sum_dtype)

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


def all_rows(leaf: jax.Array, axis: Axis) -> jax.Array:
    """Concatenates the rows of all replicas, in their order; differentiable."""
    return all_concatenate(leaf, axis, 0)


def all_concatenate(leaf: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Concatenates the replicas' arrays along `dim`; differentiable.

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
