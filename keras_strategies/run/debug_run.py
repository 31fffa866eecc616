"""`run` in debug mode: the function runs eagerly, replica by replica.

Each replica has a thread that runs the function on the replica's arrays. Only
one thread runs at a time (`passes/lockstep.py`). A scope collects the
replica's writes to variables. The writes of all replicas are then combined by
the same code as in a compiled program.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state

from keras_strategies._types import Array, Tree
from keras_strategies.hooks import on_read, seeds
from keras_strategies.hooks.variables_used import CollectingScope
from keras_strategies.keras_bridge.step_context import ReplicaScope, StepContext
from keras_strategies.passes import replay
from keras_strategies.passes.lockstep import Lockstep, Turn
from keras_strategies.run import replica_trace
from keras_strategies.spmd.identity import IdentityMap, IdentitySet
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.values import PerReplica, stack_replicas
from keras_strategies.step.ragged import ragged_call, replica_merge, variants
from keras_strategies.variables import shardings
from keras_strategies.variables.model_variables import defer_creation


def debug_run(
    fn: Callable[[int], Any],
    *,
    mesh: ReplicaMesh,
    scope: Callable[[], contextlib.AbstractContextManager[Any]],
    replica_scope: ReplicaScope,
    rows: Sequence[variants.Variant] = (),
    is_update: bool = False,
) -> Tree:
    """Calls `fn(replica)` eagerly for each replica, in place of a `RunProgram`.

    Args:
      fn: Calls the user's function with the components of the given replica.
      mesh: The mesh of the replicas.
      scope: A function that opens the strategy's scope, which is needed because
        the function may create variables.
      replica_scope: Makes the context manager of a step's replica context.
      rows: For each replica, the row counts of those arguments whose row count
        is not the same on all replicas.
      is_update: Whether the function writes the same value to every copy of
        a variable.

    Returns:
      The replicas' results as one nest, in the same form as from a compiled
      `run`.
    """
    keras_state = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    shares = variants.compute_shares(rows)
    lockstep = Lockstep(mesh.num_replicas, mesh.all_replicas)

    def replica(index: int) -> tuple[ragged_call.BranchResult, "_Written"]:
        # Keras stores its open scopes in lists in a thread-local state. This
        # thread gets copies of the lists, so that a scope that one replica
        # opens is not open for the others.
        vars(global_state.GLOBAL_STATE_TRACKER).update(
            {
                name: list(value) if isinstance(value, list) else value
                for name, value in keras_state.items()
            }
        )
        step = replica_trace.make_step(mesh, is_update=is_update)
        if rows:
            rows_of_all = variants.group_rows_of_all(rows[index], rows)
            step = step.with_facts(rows_of_all=rows_of_all)
        seen = _SeenScope(step, index)
        with scope(), defer_creation(), seen:
            with replica_trace.replica_tracing(step, replica_scope):
                results = fn(index)
            share = None if shares is None else shares[index]
            merging = replica_trace.make_step(mesh).with_facts(
                is_ragged=True, share=share
            )
            return _merge_writes(step, seen, results, merging)

    ended = lockstep.run(replica)
    _set_variables([written for _, written in ended], mesh)
    return _regroup_results([called for called, _ in ended], mesh)


_Written = list[tuple[keras.Variable, Any, Any]]
"""A replica's variables that any replica wrote, each with its value combined
from all replicas, and this replica's copy if replicas have separate ones."""


def _set_variables(written: list[_Written], mesh: ReplicaMesh) -> None:
    """Sets the variables to the values combined from all replicas."""
    for column in zip(*written, strict=True):
        variable, value, _ = column[0]
        if on_read.is_on_read(variable):
            on_read.create_copies(variable, mesh)
            copies = stack_replicas([copy for *_, copy in column], mesh)
            on_read.set_copies(variable, copies, _replicate(value, mesh))
        else:
            sharding = shardings.get_sharding(variable, mesh)
            variable._value = jax.device_put(value, sharding)


def _merge_writes(
    step: StepContext, seen: "_SeenScope", results: Tree, merging: StepContext
) -> tuple[ragged_call.BranchResult, _Written]:
    """Combines the replicas' writes to variables.

    Every replica's thread calls this after the user's function.

    Args:
      step: The context of the user's function on this replica.
      seen: The scope that collected this replica's writes.
      results: The function's results on this replica.
      merging: The context in which the writes are combined.

    Returns:
      The results and new values of the call, and the writes.
    """
    turn = replay.current.side
    assert isinstance(turn, Turn)
    # Replicas may use different variables, but all replicas must reduce the
    # same variables in the same order. So each replica reduces the union of
    # all replicas' variables.
    all_seen = turn.meet(list(seen.before))
    variables = list(IdentitySet(v for each in all_seen for v in each))
    before = [seen.get_values_before(v) for v in variables]
    old, folded = [pair[0] for pair in before], [pair[1] for pair in before]
    called = replica_trace.collect_call(step, seen, results, variables, folded)
    branches: list[ragged_call.BranchResult] = turn.meet(called)
    for k in replica_trace.find_unaggregated(branches):
        if not bool(replica_trace.is_same(called.new[k], step.axis)):
            replica_trace.refuse_difference(variables[k])
    values, copies, _ = replica_merge.merge_state(
        merging, variables, old, folded, called, branches, []
    )
    written: _Written = []
    copy = iter(copies)
    for k, variable in enumerate(variables):
        if on_read.is_on_read(variable):
            written.append((variable, values[k], next(copy)))
        elif any(branch.is_changed[k] for branch in branches):
            written.append((variable, values[k], None))
    return called, written


class _SeenScope(CollectingScope):
    """A scope that collects a call's writes, and the variables' old values.

    Args:
      step: The context of the user's function on this replica.
      replica: The id of this replica.
    """

    def __init__(self, step: StepContext, replica: int) -> None:
        super().__init__()
        self._step, self._mesh = step, step.facts.mesh
        self._replica = replica
        self.before: IdentityMap[tuple[Any, Any]] = IdentityMap()

    def get_current_value(self, variable: keras.Variable) -> Array:
        """Returns the last written value, or else the value before the call."""
        written = super().get_current_value(variable)
        if written is not None:
            return written
        return self.get_values_before(variable)[1]

    def get_values_before(self, variable: keras.Variable) -> tuple[Any, Any]:
        """Returns a variable's value on this replica before the call, twice.

        If the variable is a seed, the replica's id is folded into the second.
        """
        if variable not in self.before:
            # JAX may be tracing a branch or a loop at this point. The value
            # must be computed outside of that trace.
            with jax.ensure_compile_time_eval():
                old = self._read_start(variable)
                (folded,) = seeds.fold_seeds([variable], [old], self._step)
            self._step.notes.before[variable] = folded
            self.before[variable] = old, folded
        return self.before[variable]

    def _read_start(self, variable: keras.Variable) -> Array:
        if on_read.is_on_read(variable) and variable._value is not None:
            copies = on_read.get_copies(variable, self._mesh)
            return _replicate(np.asarray(copies)[self._replica], self._mesh)
        if variable._value is not None:
            return _replicate(variable._value, self._mesh)
        # The variable was created in this call. It gets this value when the
        # scope exits.
        return variable._initializer(variable.shape, dtype=variable.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Collects a write.

        Raises:
          RuntimeError: if the variable is on another strategy's devices.
        """
        replica_trace.refuse_foreign(update[0], self._mesh)
        self.get_values_before(update[0])
        super().add_update(update)


def _regroup_results(
    ended: list[ragged_call.BranchResult], mesh: ReplicaMesh
) -> Tree:
    """Combines the replicas' results into one nest, like a compiled `run`."""
    structures = [called.structure for called in ended]
    columns = zip(*[called.outputs for called in ended], strict=True)
    return replica_trace.rebuild_nest(
        structures[0][0],
        replica_trace.merge_constants(structures),
        (_wrap_parts(list(column), mesh) for column in columns),
        lambda values: _wrap_parts(list(map(jax.numpy.asarray, values)), mesh),
    )


def _wrap_parts(parts: list[Any], mesh: ReplicaMesh) -> Array:
    if mesh.num_replicas == 1:
        return parts[0]
    return PerReplica(list(map(jax.device_put, parts, mesh.first_devices)))


def _replicate(value: Array, mesh: ReplicaMesh) -> jax.Array:
    return jax.device_put(value, mesh.whole)
