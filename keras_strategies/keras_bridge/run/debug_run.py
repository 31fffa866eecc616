"""`run` in debug mode: Python itself, replica by replica.

Every replica runs the function on its own arrays in a thread of its own, one
at a time (`_core/jaxprs/lockstep.py`); what it writes is kept in a scope and
merged by the same code that the compiled program is made of.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state

from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._core.jaxprs.lockstep import Lockstep, Turn
from keras_strategies._core.jaxprs.replay import current_side
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import STACKED, PerReplica, stacked
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks import on_read, seeds
from keras_strategies.keras_bridge.hooks.variables_used import CollectingScope
from keras_strategies.keras_bridge.run import replica_trace, run_results
from keras_strategies.keras_bridge.step_context import ReplicaScope, StepContext
from keras_strategies.keras_bridge.steps import (
    replica_merge,
    uneven_rows,
    variants,
)
from keras_strategies.keras_bridge.variables import shardings
from keras_strategies.keras_bridge.variables.deferred_creation import deferred


def debug_run(
    fn: Callable[[int], Any],
    *,
    mesh: ReplicaMesh,
    scope: Callable[[], contextlib.AbstractContextManager[Any]],
    replica_scope: ReplicaScope,
    rows: Sequence[variants.Variant] = (),
    is_update: bool = False,
) -> Tree:
    """Calls `fn(replica)` eagerly for each replica; as a `RunProgram` would.

    Args:
      fn: The user's function, of the replica's components.
      mesh: The replicas.
      scope: Opens the strategy's scope: the function may create variables.
      replica_scope: Makes a replica context of a step for a block.
      rows: Each replica's numbers of rows, of all uneven arguments.
      is_update: Whether it writes the same to every copy.

    Returns:
      The results as one nest, as a compiled `run` returns it.
    """
    keras_state = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    shares = variants.shares_of(rows)
    lockstep = Lockstep(mesh.num_replicas, mesh.all_replicas)

    def replica(index: int) -> "_Ended":
        # What is open is kept in lists: each thread has its own.
        vars(global_state.GLOBAL_STATE_TRACKER).update(
            {
                name: list(value) if isinstance(value, list) else value
                for name, value in keras_state.items()
            }
        )
        step = replica_trace.new_step(mesh, is_update=is_update)
        if rows:
            own = variants.rows_of_all(rows[index], rows)
            step = step.with_facts(rows_of_all=own)
        seen = _SeenScope(step, mesh, index)
        with scope(), deferred(), seen:
            with replica_trace.replica_tracing(step, replica_scope):
                results = fn(index)
            share = None if shares is None else shares[index]
            merging = replica_trace.new_step(mesh).with_facts(
                is_uneven=True, share=share
            )
            return _merged(step, seen, results, merging)

    ended: list[_Ended] = lockstep.run(replica)
    _hold(ended, mesh)
    return _regrouped([e.called for e in ended], mesh)


class _Ended(NamedTuple):
    """What a replica's call has come to.

    Attributes:
      written: The variables that some replica wrote, with their merged values.
      copies: Of those with a copy on each replica this one's, by their ids.
      called: What the call left behind.
    """

    written: list[tuple[keras.Variable, Any]]
    copies: dict[int, Any]
    called: uneven_rows.Called


def _hold(ended: list[_Ended], mesh: ReplicaMesh) -> None:
    """Sets the variables to their merged values."""
    for variable, value in ended[0].written:
        if on_read.is_on_read(variable):
            on_read.settle(variable, mesh)
            copies = stacked([e.copies[id(variable)] for e in ended], mesh)
            on_read.hold(variable, copies, _whole(value, mesh))
        else:
            held = shardings.sharding_of(variable, mesh)
            variable._value = jax.device_put(value, held)


def _merged(
    step: StepContext, seen: "_SeenScope", results: Tree, merging: StepContext
) -> _Ended:
    """Merges what the replicas wrote, in the step `merging`; on each."""
    turn = current_side()
    assert isinstance(turn, Turn)
    of_all = turn.meet(list(seen.old))
    variables = list(IdentitySet(v for each in of_all for v in each))
    folded = [seen.get_current_value_before(v) for v in variables]
    called = replica_trace.called_in(step, seen, results, variables, folded)
    notes: list[replica_merge.Note] = turn.meet(called.note)
    unchecked = replica_trace.unaggregated(notes)
    for k in unchecked:
        if not bool(replica_trace.is_same(called.new[k], step.axis)):
            replica_trace.refuse_difference(variables[k])
    old = [seen.old[v] for v in variables]
    values, copies, _ = replica_merge.merged_state(
        merging, variables, old, folded, called, notes, []
    )
    copied = [id(v) for v in variables if on_read.is_on_read(v)]
    written = [
        (v, values[k])
        for k, v in enumerate(variables)
        if on_read.is_on_read(v) or any(n.is_changed[k] for n in notes)
    ]
    return _Ended(written, dict(zip(copied, copies, strict=True)), called)


class _SeenScope(CollectingScope):
    """Keeps writes, and what variables were when they were first met.

    Args:
      step: The replica's step.
      mesh: The replicas.
      replica: Which of them this is.
    """

    def __init__(
        self, step: StepContext, mesh: ReplicaMesh, replica: int
    ) -> None:
        super().__init__()
        self._step = step
        self._mesh = mesh
        self._replica = replica
        self.old: IdentityMap[Any] = IdentityMap()
        self._folded: IdentityMap[Any] = IdentityMap()

    def get_current_value(self, variable: keras.Variable) -> Array:
        """The value written last, or that before the call."""
        written = super().get_current_value(variable)
        if written is not None:
            return written
        return self.get_current_value_before(variable)

    def get_current_value_before(self, variable: keras.Variable) -> Array:
        """This replica's value before the call, its seed folded."""
        if variable not in self.old:
            # Not in the branch or loop that may be traced.
            with jax.ensure_compile_time_eval():
                self.old[variable] = old = self._start(variable)
                (folded,) = seeds.fold_seeds([variable], [old], self._step)
            self._step.notes.before[variable] = folded
            self._folded[variable] = folded
        return self._folded[variable]

    def _start(self, variable: keras.Variable) -> Array:
        if on_read.is_on_read(variable) and variable._value is not None:
            copies = on_read.copies_of(variable, self._mesh)
            return _whole(np.asarray(copies)[self._replica], self._mesh)
        if variable._value is not None:
            return _whole(variable._value, self._mesh)
        # Made in this call; it gets this value when the scope is left.
        return variable._initializer(variable.shape, dtype=variable.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps a write."""
        replica_trace.refuse_foreign(update[0], self._mesh)
        self.get_current_value_before(update[0])
        super().add_update(update)


def _regrouped(ended: list[uneven_rows.Called], mesh: ReplicaMesh) -> Tree:
    """The replicas' results as one nest, as a compiled `run` returns it."""
    notes = [called.note.structure for called in ended]
    columns = zip(*[called.outputs for called in ended], strict=True)
    return run_results.nest_of(
        notes[0][0],
        run_results.regrouped_constants(notes),
        (_wrapped(list(column), mesh) for column in columns),
        lambda values: _wrapped(list(map(jax.numpy.asarray, values)), mesh),
    )


def _wrapped(parts: list[Any], mesh: ReplicaMesh) -> Array:
    if mesh.num_replicas == 1:
        return parts[0]
    if len({(part.shape, str(part.dtype)) for part in parts}) > 1:
        return PerReplica(
            [
                jax.device_put(part, device)
                for part, device in zip(parts, mesh.first_devices, strict=True)
            ]
        )
    return PerReplica.of(stacked(parts, mesh), STACKED)


def _whole(value: Array, mesh: ReplicaMesh) -> jax.Array:
    return jax.device_put(value, mesh.whole)
