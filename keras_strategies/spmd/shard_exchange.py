"""The collectives between the replicas that share a value's shards."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd.dispatch import keep_out_of_cache
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import core_map
from keras_strategies.spmd.scatter_blocks import find_block, scatters_rows


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

        return self.join_cores(self._by_core(gather, spec)(shard), spec)

    def join_cores(self, value: jax.Array, spec: Sharded) -> jax.Array:
        """Gathers a value from the cores that share the replica's sequences."""
        model = self._mesh.model_axis
        if not self._mesh.context_parallel or model not in spec.sharding.spec:
            return value
        dim = spec.sharding.spec.index(model)

        def gather(part: jax.Array) -> jax.Array:
            return jax.lax.all_gather(part, model, axis=dim, tiled=True)

        specs = PartitionSpec(*[None] * dim, model), PartitionSpec()
        return core_map(
            gather, self._mesh, in_specs=specs[0], out_specs=specs[1]
        )(value)

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

        return self._by_core(gather, None, self._find_tokens(ids, 1, 2))(ids)

    def swap(self, value: jax.Array, split: int, stack: int) -> jax.Array:
        """Sends slice i along dimension `split` to the i-th replica."""

        def swap(value: jax.Array) -> jax.Array:
            # The first dimension is split and stacked, so that XLA chooses when
            # to transpose.
            first = jnp.moveaxis(value, split, 0)
            received = jax.lax.all_to_all(first, self._mesh.axis, 0, 0)
            return jnp.moveaxis(received, 0, stack)

        # The dimension that is split or stacked may be before the tokens.
        dims = (1 + (dim <= 1) for dim in (split, stack))
        tokens = self._find_tokens(value, *dims)
        return self._by_core(swap, None, tokens)(value)

    def sum_shards(self, shard: jax.Array, spec: Sharded) -> jax.Array:
        """Returns the sum of a shard over the groups of replicas."""
        return self._by_core(self._sum_groups, spec)(shard)

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
            if scatters_rows(value.shape, dim, count):
                spec = dataclasses.replace(spec, dim=0)
                rows = self._scatter_in_group(value, spec)
                return jax.lax.all_to_all(rows, mesh.axis, 1, 0, tiled=True)
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

    def _find_tokens(
        self, value: jax.Array, before: int, after: int
    ) -> tuple[int, int] | None:
        """Returns the tokens' dimensions if cores share the tokens, else None.

        Args:
          value: Ids of shape (rows, tokens, 1), or rows of a table for them.
          before: The dimension of the tokens.
          after: Their dimension in the result of a collective.
        """
        mesh = self._mesh
        is_shared = mesh.context_parallel and value.ndim > before + 1
        if not is_shared or value.shape[before] % mesh.cores_per_replica:
            return None
        return before, after

    def _by_core(
        self,
        fn: Callable[[jax.Array], jax.Array],
        spec: Sharded | None,
        tokens: tuple[int, int] | None = None,
    ) -> Callable[[jax.Array], jax.Array]:
        """Maps a function over a replica's cores and their parts of an array.

        Args:
          fn: A function that works entry by entry along the dimension that is
            sharded over the cores.
          spec: The spec of the array; None if each core has all of it, or a
            part of the tokens.
          tokens: See `_find_tokens`.
        """
        if self._mesh.cores_per_replica == 1:
            return fn
        model = self._mesh.model_axis
        axes: list[str | None] = []
        if spec is not None:
            axes = [a if a == model else None for a in spec.sharding.spec]
        specs = [PartitionSpec(*axes)] * 2
        if tokens is not None:
            specs = [PartitionSpec(*[None] * dim, model) for dim in tokens]
        return core_map(fn, self._mesh, in_specs=specs[0], out_specs=specs[1])
