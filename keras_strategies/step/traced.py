"""Traces a function once, and changes the trace before it is computed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes import traces
from keras_strategies.passes.combined_sums import with_combined_sums
from keras_strategies.passes.constrained_operations import constrain_operations
from keras_strategies.passes.weight_gradients import rewrite_gradients
from keras_strategies.spmd.batches import RowShape, constrain_rows, cut_padding
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import all_sum, is_sum_if


class Traced:
    """A function that is traced only once, so that its trace can be checked.

    Args:
      fn: The function.
      *args: Arguments to trace it with.
    """

    def __init__(self, fn: Callable[..., Any], *args: Tree) -> None:
        self.jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._structure = jax.tree.structure(shapes)
        self._compute = jaxpr_as_fun(self.jaxpr)

    def combine_sums(self, step: StepContext) -> None:
        """Merges the trace's sums over the replicas, if they are expensive."""
        if not are_sums_expensive(step):
            return
        buffering = step.buffering
        self._compute = with_combined_sums(
            self.jaxpr,
            step.axis,
            lambda leaves: all_sum(leaves, step.axis, buffering),
            is_sum_if,
            lambda arrays: buffering is None or buffering.fits(arrays),
        )

    def shard(self, mesh: ReplicaMesh) -> None:
        """Prepares the trace for XLA, which shards it over all devices."""
        axes = mesh.mesh.axis_names
        jaxpr = self.jaxpr
        if mesh.num_replicas > 1:
            jaxpr = rewrite_gradients(jaxpr)
        self._compute = jaxpr_as_fun(
            constrain_operations(jaxpr, axes, mesh.mesh)
        )

    def __call__(self, *args: Tree) -> Tree:
        """Computes the function from its trace."""
        leaves = self._compute(*jax.tree.leaves(args))
        return jax.tree.unflatten(self._structure, leaves)


def combine_sums(
    fn: Callable[..., Any], step: StepContext
) -> Callable[..., Any]:
    """Wraps a function so that its sums over replicas become fewer sums."""
    if not are_sums_expensive(step):
        return fn

    def call_combined(*args: Tree) -> Tree:
        traced = Traced(fn, *args)
        traced.combine_sums(step)
        return traced(*args)

    return call_combined


def are_sums_expensive(step: StepContext) -> bool:
    """Returns whether sums are slow and the compiler does not combine them."""
    mesh = step.facts.mesh
    if mesh.platform != "cpu" or mesh.num_replicas == 1:
        return False
    return mesh.num_processes > 1 or step.buffering is not None


def call_on_global_batch(
    body: Callable[..., Any],
    state: tuple[Any, ...],
    data: Batch,
    shape: RowShape,
    mesh: ReplicaMesh,
) -> tuple[Any, ...]:
    """Cuts the padding off a batch, then computes `body(*state, data)`."""
    data = cut_padding(data, shape)
    traced = Traced(body, *state, data)
    is_sharded = not traces.has_unsafe_scatters(traced.jaxpr)
    data = constrain_rows(data, shape, mesh, is_sharded=is_sharded)
    traced.shard(mesh)
    return traced(*state, data)
