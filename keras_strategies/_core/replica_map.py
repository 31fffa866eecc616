"""A function mapped over the replicas of a mesh, and its collectives.

The only user of `jax.shard_map`. `check_vma` is off: layers of Keras do not
trace under it, and it would sum gradients of replicated weights by itself
(docs/decisions/01-mapped-programs.md). It also hides replicas that disagree,
so the tests compare all copies of every replicated array.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from keras_strategies._core.buffers import Buffering, packed, unpacked
from keras_strategies._core.jaxprs import replay, stages
from keras_strategies._core.jaxprs.lockstep import Turn
from keras_strategies._core.jaxprs.specs import Axis, Sharded
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Equation, Tree

# Of a shard: the rows of a TPU's tile, and the columns of eight.
_TILE_ROWS = 8
_TILE_COLUMNS = 1024


def replica_map(
    fn: Callable[..., Tree],
    mesh: ReplicaMesh,
    *,
    in_specs: Tree,
    out_specs: Tree,
) -> Callable[..., Tree]:
    """Maps `fn` over the replicas: manual over their axis, traced once."""
    return jax.shard_map(
        fn,
        mesh=mesh.mesh,
        axis_names=set(mesh.replica_axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


class ShardExchange:
    """Gathers and scatters values that replicas divide (`sharded_values`).

    Of replicas of several cores each core sends what it holds: XLA by itself
    would gather over the cores first, and send whole arrays.

    Args:
      mesh: The replicas.
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._mesh = mesh

    def gather(self, shard: jax.Array, spec: Sharded) -> jax.Array:
        """The whole value, of this replica's shard."""
        axis = self._mesh.axis

        def gather(part: jax.Array) -> jax.Array:
            return jax.lax.all_gather(part, axis, axis=spec.dim, tiled=True)

        return self._by_core(gather, spec)(shard)

    def scatter(self, value: jax.Array, spec: Sharded) -> jax.Array:
        """This replica's shard of the replicas' values, summed."""
        *groups, axis = self._mesh.replica_axes

        def scatter(part: jax.Array) -> jax.Array:
            sent = part.astype(spec.sum_dtype or part.dtype)
            count = jax.lax.axis_size(axis)
            is_tiled = self._mesh.platform != "tpu" or not _is_of_blocks(
                sent.shape, spec.dim, count
            )
            if not is_tiled:
                sent = sent.reshape(count, -1, sent.shape[1])
            shard = jax.lax.psum_scatter(
                sent, axis, scatter_dimension=spec.dim, tiled=is_tiled
            )
            if groups:
                shard = jax.lax.psum(shard, tuple(groups))
            return shard.astype(part.dtype)

        return self._by_core(scatter, spec)(value)

    def cut(self, whole: jax.Array, spec: Sharded) -> jax.Array:
        """This replica's shard of a value that all have."""
        size = whole.shape[spec.dim] // jax.lax.axis_size(self._mesh.axis)
        start = jax.lax.axis_index(self._mesh.axis) * size
        return jax.lax.dynamic_slice_in_dim(whole, start, size, spec.dim)

    def _by_core(
        self, fn: Callable[[jax.Array], jax.Array], spec: Sharded
    ) -> Callable[[jax.Array], jax.Array]:
        """A replica's function, mapped over its cores; they keep their parts.

        Args:
          fn: Does not look along the dimension that the cores divide.
          spec: Of the array.
        """
        if self._mesh.cores_per_replica == 1:
            return fn
        model = self._mesh.model_axis
        axes = [a if a == model else None for a in spec.sharding.spec]
        cores = PartitionSpec(*axes)
        return jax.shard_map(
            fn,
            axis_names={model},
            in_specs=cores,
            out_specs=cores,
            check_vma=False,
        )


def _is_of_blocks(shape: tuple[int, ...], dim: int, count: int) -> bool:
    """Whether a sum is scattered as an array of blocks, one for each replica.

    XLA for TPUs (libtpu 0.0.42) scatters some matrices by rows as an
    all-reduce of the whole matrix, and the same as blocks of whole tiles as a
    reduce-scatter; others the other way round (docs/sharding.md).
    """
    if len(shape) != 2 or dim != 0:
        return False
    rows, columns = shape[0] // count, shape[1]
    is_of_tiles = rows % _TILE_ROWS == 0 and columns % _TILE_COLUMNS == 0
    return is_of_tiles and columns > 0


def replicated_spec() -> PartitionSpec:
    """The spec of a value that every replica holds whole."""
    return PartitionSpec()


def split_spec(mesh: ReplicaMesh, *, dim: int = 0) -> PartitionSpec:
    """The spec of a value whose dimension `dim` is split over replicas."""
    return PartitionSpec(*[None] * dim, mesh.all_replicas)


def replica_id(axis: Axis) -> jax.Array | int:
    """The id of the calling replica: traced int32, an int in lockstep."""
    side = replay.current_side()
    if isinstance(side, Turn | replay.Alone):
        return side.replica
    return jax.lax.axis_index(axis)


def all_sum(
    leaves: Sequence[jax.Array], axis: Axis, buffering: Buffering | None = None
) -> list[jax.Array]:
    """Sums each array over the replicas.

    Args:
      leaves: Arrays of any shapes and dtypes, one value per replica.
      axis: The replica axis.
      buffering: Which of them travel in one buffer; None: each for itself.

    Returns:
      The sums, in the order and with the shapes of `leaves`.

    References:
      XLA sums by a reduce-scatter and an all-gather, as Rabenseifner,
      Optimization of Collective Reduction Operations (ICCS 2004).
    """
    if not leaves:
        return []
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if isinstance(replay.current_side(), Turn):
        # Computed on the spot, op by op: a buffer would only cost.
        buffering = None
    reduce = functools.partial(_sum, axis=axis, buffering=buffering)
    return replay.collective(reduce, arrays)


def _sum(
    leaves: list[jax.Array], *, axis: Axis, buffering: Buffering | None
) -> list[jax.Array]:
    sums: list[Any] = [None] * len(leaves)
    for members in buffering.groups(leaves) if buffering else ():
        group = [leaves[i] for i in members]
        total = _psum(packed(group), axis)
        for i, piece in zip(members, unpacked(total, group), strict=True):
            sums[i] = piece
    return [
        _psum(leaf, axis) if total is None else total
        for leaf, total in zip(leaves, sums, strict=True)
    ]


def _psum(leaf: jax.Array, axis: Axis) -> jax.Array:
    # XLA's partitioner refuses a sum over one replica, if it has several cores
    # (jax 0.10).
    is_alone = jax.lax.axis_size(axis) == 1
    return leaf if is_alone else jax.lax.psum(leaf, axis)


def all_max(leaf: jax.Array, axis: Axis) -> jax.Array:
    """The elementwise maximum over the replicas."""
    return _one(lambda a: jax.lax.pmax(a, axis), leaf)


def all_min(leaf: jax.Array, axis: Axis) -> jax.Array:
    """The elementwise minimum over the replicas."""
    return _one(lambda a: jax.lax.pmin(a, axis), leaf)


def all_mean(leaf: jax.Array, axis: Axis) -> jax.Array:
    """The mean over the replicas; gradients flow through it."""
    return _one(lambda a: jax.lax.pmean(a, axis), leaf)


def all_rows(leaf: jax.Array, axis: Axis) -> jax.Array:
    """The rows of all replicas, in their order; gradients flow through."""
    return all_concatenated(leaf, axis, 0)


def all_concatenated(leaf: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """The replicas' arrays concatenated along `dim`; gradients flow.

    Where replicas with different numbers of rows are replayed, or take turns,
    their arrays may differ in that dimension.
    """
    return replay.collective(replay.Concatenation(axis, dim), [leaf])[0]


def as_number(array: Array) -> Array:
    """An array as it is added up and compared: booleans are counted.

    Returns:
      An array of the same shape, of dtype int32 for booleans.
    """
    return array.astype("int32") if array.dtype == bool else array


def of_first(array: Array, axis: Axis) -> jax.Array:
    """The array of replica 0, zeros on others: what all have in sum."""
    is_first = replica_id(axis) == 0
    return jnp.where(is_first, array, jnp.zeros_like(array))


def _one(reduce: Callable[[Any], Any], leaf: Array) -> Array:
    return replay.collective(lambda leaves: [reduce(leaves[0])], [leaf])[0]


_COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter")
_UNSURE = ("cond", "while")


def has_unsure_collectives(jaxpr: ClosedJaxpr) -> bool:
    """Whether a traced program communicates where some replicas may not go."""
    return any(
        inner.primitive.name.startswith(_COLLECTIVES)
        for equation in stages.all_equations(jaxpr)
        if equation.primitive.name in _UNSURE
        for inner in stages.equations_in(equation)
    )


def has_convolutions(jaxpr: ClosedJaxpr) -> bool:
    """Whether a traced program computes convolutions."""
    return any(
        equation.primitive.name == "conv_general_dilated"
        for equation in stages.all_equations(jaxpr)
    )


def has_unsafe_scatters(jaxpr: ClosedJaxpr) -> bool:
    """Whether a traced program scatters in a way that XLA cannot divide.

    Where rows are divided unevenly, XLA's partitioner (jaxlib 0.10.2) takes
    padding into gradients of rows that are set or multiplied, and aborts the
    process where unsigned numbers say the places within rows, as in gradients
    of sorts, medians and quantiles. Sums, as in embeddings, are right.
    """

    def is_one(equation: Equation) -> bool:
        name = equation.primitive.name
        if not name.startswith("scatter"):
            return False
        numbers = equation.params["dimension_numbers"]
        indices = equation.invars[1].aval.dtype
        is_unsigned = jnp.issubdtype(indices, jnp.unsignedinteger)
        is_within_rows = bool(numbers.operand_batching_dims)
        return name != "scatter-add" or (is_unsigned and is_within_rows)

    return any(map(is_one, stages.all_equations(jaxpr)))
