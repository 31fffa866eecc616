"""Traces a function once, changes the trace, and makes loops and programs."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from keras_strategies._types import Batch, Tree
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.passes import traces
from keras_strategies.passes.constrained_operations import constrain_operations
from keras_strategies.passes.loop_storage import rewrite_loops
from keras_strategies.passes.marked_updates import collect, collect_updates
from keras_strategies.passes.weight_gradients import rewrite_gradients
from keras_strategies.spmd.batches import RowShape, constrain_rows, cut_padding
from keras_strategies.spmd.buffers import choose_buffering, with_combined_sums
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.state.layout import Step
from keras_strategies.tape.expansion import expand_tapes, may_have_tapes


class Traced:
    """A function that is traced only once, so that its trace can be checked.

    Args:
      fn: The function.
      *args: Arguments to trace it with.

    Attributes:
      jaxpr: The trace.
      shapes: The shapes of the function's results.
      updates: The marked optimizer updates in the trace, by name.
    """

    def __init__(self, fn: Callable[..., Any], *args: Tree) -> None:
        with collect_updates() as self.updates:
            tracing = jax.make_jaxpr(fn, return_shape=True)
            jaxpr, self.shapes = tracing(*args)
        self.jaxpr = expand_tapes(jaxpr)
        # The analysis reads the trace as it is; this is what is computed.
        self._program = rewrite_loops(self.jaxpr)
        self._compute = jaxpr_as_fun(self._program)

    def combine_sums(self, mesh: ReplicaMesh) -> "Traced":
        """Makes it compute fewer sums, if they are slow; returns itself."""
        if are_sums_expensive(mesh):
            axis, buffering = mesh.all_replicas, choose_buffering(mesh)
            self._compute = with_combined_sums(self._program, axis, buffering)
        return self

    def shard(self, mesh: ReplicaMesh) -> None:
        """Prepares the trace for XLA, which shards it over all devices."""
        axes = mesh.mesh.axis_names
        jaxpr = self._program
        if mesh.num_replicas > 1:
            jaxpr = rewrite_gradients(jaxpr)
        self._compute = jaxpr_as_fun(
            constrain_operations(jaxpr, axes, mesh.mesh)
        )

    def __call__(self, *args: Tree) -> Tree:
        """Computes the function from its trace."""
        collect(self.updates)
        leaves = self._compute(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)


def combine_sums(
    fn: Callable[..., Any], mesh: ReplicaMesh
) -> Callable[..., Any]:
    """Wraps a function so that its sums over replicas become fewer sums.

    The gradients of tapes are computed, too.
    """

    def call_combined(*args: Tree) -> Tree:
        if not (are_sums_expensive(mesh) or may_have_tapes()):
            return fn(*args)
        return Traced(fn, *args).combine_sums(mesh)(*args)

    return call_combined


def are_sums_expensive(mesh: ReplicaMesh) -> bool:
    """Returns whether sums are slow and the compiler does not combine them."""
    if mesh.platform != "cpu" or mesh.num_replicas == 1:
        return False
    return mesh.num_processes > 1 or choose_buffering(mesh) is not None


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


def jit_named(
    fn: Callable[..., Any], name: str, **options: Any
) -> jax.stages.Wrapped:
    """Compiles a function under a name that profiles and dumps show."""

    def program(*args: Tree) -> Tree:
        with traces.without_collector():
            return fn(*args)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)


def scan_steps(body: Step, *, returns_rows: bool) -> Step:
    """Turns the step of one batch into a loop over stacked batches.

    Args:
      body: The step.
      returns_rows: Whether the loop returns the results of all steps, not only
        those of the last one.
    """

    def many(written: Group, read: Group, data: Batch) -> tuple[Any, ...]:
        are_changed: list[list[bool]] = []

        def one(carry: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
            results, written, changed = body(*carry, batch)
            are_changed[:] = [[v is not None for v in g] for g in changed]
            read = map(merge_lib.apply_changes, carry[1], changed)
            return (written, list(read)), results

        (written, read), results = jax.lax.scan(one, (written, read), data)
        changed = [
            [value if kept else None for value, kept in zip(*pair, strict=True)]
            for pair in zip(read, are_changed, strict=True)
        ]
        if not returns_rows:
            results = jax.tree.map(lambda a: a[-1], results)
        return results, written, changed

    return many
