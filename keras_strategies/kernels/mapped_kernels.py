"""Kernels mapped over the cores of replicas, as XLA cannot partition them."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_strategies._types import Array
from keras_strategies.kernels.splash_attention import (
    can_share_heads,
    pad_rows,
)
from keras_strategies.passes.specs import Axis
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import core_map


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The trace of a step for a mesh.

    Attributes:
      mesh: The replicas.
      is_global: Whether arrays have the rows of all of several replicas.
    """

    mesh: ReplicaMesh
    is_global: bool

    @property
    def rows(self) -> Axis | None:
        """The mesh axes over which rows are sharded; None if they are not."""
        return self.mesh.all_replicas if self.is_global else None

    @property
    def model(self) -> str | None:
        """The mesh axis over which heads are sharded; None if they are not."""
        mesh = self.mesh
        return mesh.model_axis if mesh.cores_per_replica > 1 else None


class _Thread(threading.local):
    """The state of a thread.

    Attributes:
      trace: The trace of the step that the thread traces or lowers, or None.
    """

    trace: Trace | None = None


thread = _Thread()


def current_trace() -> Trace | None:
    """Returns the trace of the step that this thread makes, or None."""
    return thread.trace


def map_attention(
    trace: Trace,
    attend: Callable[..., jax.Array],
    arrays: Sequence[Any],
    *,
    num_padding: int = 0,
) -> jax.Array:
    """Computes attention on each core for its heads.

    Fewer heads of keys than cores are repeated. Every core computes all heads
    if the cores cannot share them evenly.

    Args:
      trace: The trace of the step.
      attend: A function of the arrays that returns an array like the query.
      arrays: Query, key and value, of shape (batch, length, heads, depth), then
        arrays of shape (batch, length), then arrays of shape (batch or 1, heads
        or 1, T, S). All but the first three may be None.
      num_padding: The number of arrays of shape (batch, length).
    """
    query, key, *_ = arrays
    cores, rows, model = trace.mesh.cores_per_replica, trace.rows, trace.model
    if not can_share_heads(cores, query, key):
        model = None
    elif key.shape[2] < cores:
        shares = cores // key.shape[2]
        more = (jnp.repeat(x, shares, axis=2) for x in arrays[1:3])
        arrays = [query, *more, *arrays[3:]]
    heads = PartitionSpec(rows, None, model)
    are_even = not any(x.shape[1] % cores for x in (query, key))
    if model is not None and trace.mesh.context_parallel and are_even:
        heads = PartitionSpec(rows, model)
        attend = _exchange_tokens(attend, model)
    specs = [heads] * 3 + [PartitionSpec(rows)] * num_padding
    for array in arrays[len(specs) :]:
        sizes = (1, 1) if array is None else array.shape[:2]
        axes = zip((rows, model), sizes, strict=True)
        specs.append(PartitionSpec(*(a if n > 1 else None for a, n in axes)))
    return map_over_cores(
        trace, attend, arrays, specs, out_spec=heads, count=len(query)
    )


def _exchange_tokens(
    attend: Callable[..., jax.Array], axis: str
) -> Callable[..., jax.Array]:
    """Wraps attention for cores that each have a part of the tokens.

    The cores exchange all heads of their tokens for all tokens of their heads,
    and the results the other way.

    Args:
      attend: A function of query, key, value and further arrays.
      axis: The mesh axis of the cores.

    References:
      - Jacobs et al., DeepSpeed Ulysses (2023): https://arxiv.org/abs/2309.14509
    """

    def exchange(array: jax.Array, split: int, join: int) -> jax.Array:
        return jax.lax.all_to_all(array, axis, split, join, tiled=True)

    def call(
        query: jax.Array, key: jax.Array, value: jax.Array, *others: Any
    ) -> jax.Array:
        heads = [exchange(x, 2, 1) for x in (query, key, value)]
        return exchange(attend(*heads, *others), 1, 2)

    return call


def map_over_cores(
    trace: Trace,
    kernel: Callable[..., Any],
    arrays: Sequence[Array | None],
    specs: Sequence[PartitionSpec],
    *,
    out_spec: PartitionSpec,
    count: int,
    padding: str = "constant",
) -> Any:
    """Calls a kernel on each core.

    In the trace of a global batch, a core computes its replica's rows.

    Args:
      trace: The trace of the step.
      kernel: A function of arrays that computes each row of its results from
        the same row of the arrays.
      arrays: The arguments. The first dimension of those that have rows is that
        of the rows.
      specs: A spec for each array, over `trace.rows` and `trace.model`.
      out_spec: The spec of the results.
      count: The number of rows.
      padding: The mode of `jnp.pad` for the rows that make the number divisible
        by the number of replicas.
    """
    if trace.model is None and trace.rows is None:
        return kernel(*arrays)
    missing = -count % trace.mesh.num_replicas if trace.is_global else 0
    mapped = core_map(
        kernel,
        trace.mesh,
        in_specs=tuple(specs),
        out_specs=out_spec,
        is_global=trace.is_global,
    )
    padded = [
        pad_rows(x, missing, padding)
        if missing and x is not None and any(tuple(spec)[:1])
        else x
        for x, spec in zip(arrays, specs, strict=True)
    ]
    return jax.tree.map(lambda result: result[:count], mapped(*padded))
