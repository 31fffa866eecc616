"""The trace of a replica in `run`: a user's function, and the merge of states.

Called while the program is traced, or once on each replica's own arrays in
debug mode.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.mesh import ReplicaMesh, shown_devices
from keras_strategies._core.replica_map import all_max, all_min, as_number
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks import variables_used
from keras_strategies.keras_bridge.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.run import run_results
from keras_strategies.keras_bridge.run.mappings import opened
from keras_strategies.keras_bridge.step_context import (
    ReplicaScope,
    StepContext,
    StepFacts,
    StepFlags,
    step_scope,
)
from keras_strategies.keras_bridge.steps import replica_merge
from keras_strategies.keras_bridge.steps.attention import attention_for
from keras_strategies.keras_bridge.steps.uneven_rows import Called
from keras_strategies.keras_bridge.variables.shardings import placement_of

_SUMMED = 64
"""Results of up to so many entries are summed in the program."""


def new_step(mesh: ReplicaMesh, *, is_update: bool = False) -> StepContext:
    """The step of a user's own function."""
    return StepContext(
        facts=StepFacts(mesh=mesh, rows=1, is_local=True),
        flags=StepFlags(sees_global_batch=True, in_update=is_update),
    )


@contextlib.contextmanager
def replica_tracing(
    step: StepContext, replica_scope: ReplicaScope
) -> Iterator[None]:
    """What is in place while a user's function runs on a replica."""
    with (
        trace_hooks(),
        attention_for(step.facts.mesh),
        variables_used.scopes_ask_outwards(),
        step_scope(step),
        replica_scope(step),
    ):
        yield


def called_in(
    step: StepContext,
    scope: keras.StatelessScope,
    results: Tree,
    variables: list[keras.Variable],
    folded: list[Any],
) -> Called:
    """What a call of the user's function left behind.

    Args:
      step: The step that it ran in.
      scope: The scope that it ran in.
      results: What it returned.
      variables: The variables that are of interest.
      folded: Their values before it.
    """
    new = [scope.get_current_value(v) for v in variables]

    def is_none(value: object) -> bool:
        return value is None

    nest = opened(results, is_none)
    leaves, structure = jax.tree.flatten(nest, is_leaf=is_none)
    constants = [run_results.constant_of(leaf) for leaf in leaves]
    outputs = [
        jnp.asarray(leaf)
        for leaf, constant in zip(leaves, constants, strict=True)
        if constant is None
    ]
    return replica_merge.called(
        step, variables, (folded, new), outputs, (structure, constants)
    )


def report_of(
    mesh: ReplicaMesh,
    outputs: list[Any],
    notes: list[replica_merge.Note],
    shapes: list[list[tuple[int, ...]]] | None,
    num_written: int,
) -> run_results.TraceReport:
    """What the trace of a run program found.

    Args:
      mesh: The replicas.
      outputs: The results that are arrays.
      notes: Of every variant of the call.
      shapes: Each replica's shapes of the outputs; None: those of `outputs`.
      num_written: How many variables, the first ones, are written.

    Raises:
      ValueError: the variants return nests of different structures.
    """
    structures = [note.structure for note in notes]
    found = run_results.TraceReport(
        structure=structures[0][0],
        constants=run_results.regrouped_constants(structures),
        summed=[],
        unchecked=[k for k in unaggregated(notes) if k < num_written],
        shapes=shapes,
    )
    if mesh.num_replicas == 1:
        return found
    small = [k for k, output in enumerate(outputs) if output.size <= _SUMMED]
    summed = [k for k in small if found.shapes_of(k) is None]
    return dataclasses.replace(found, summed=summed)


def is_same(value: Array, axis: Axis) -> jax.Array:
    """Whether all replicas have one value; NaN equals itself.

    Returns:
      A scalar boolean.
    """
    is_nan = value != value
    number = jnp.where(is_nan, jnp.zeros_like(value), value)
    number = as_number(number)
    highest, lowest = all_max(number, axis), all_min(number, axis)
    nans = is_nan.astype("int32")
    same_nans = all_max(nans, axis) == all_min(nans, axis)
    return jnp.all((highest == lowest) & same_nans)


def unaggregated(notes: list[replica_merge.Note]) -> list[int]:
    """Positions of the variables that all replicas must have written alike."""
    return [
        k
        for k in range(len(notes[0].is_unaggregated))
        if any(note.is_unaggregated[k] for note in notes)
    ]


def refuse_difference(variable: keras.Variable) -> None:
    """Raises ValueError: replicas wrote different values to a variable."""
    raise ValueError(
        "The replicas wrote different values to a variable that has "
        "no aggregation, and their copies may not differ. Received: "
        f"{variable.path!r} with aggregation='none' (it now holds "
        "a mean of them, or replica 0's integer). Create it with "
        'aggregation="sum", "mean" or "only_first_replica".'
    )


def refuse_foreign(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Raises RuntimeError for a variable that lies on other devices.

    Its strategy would find it on these, and other variables of its own not.
    """
    devices = getattr(variable._layout, "device_set", None)
    placement = placement_of(variable)
    is_sharded = placement is not None and placement.mesh is not mesh
    if devices is None or (devices == set(mesh.devices) and not is_sharded):
        return
    theirs = sorted(devices, key=lambda device: device.id)
    shown = shown_devices(theirs)
    if is_sharded:
        shown += ", which divides it"
    raise RuntimeError(
        "Mixing strategies: in `run` a variable is written by the strategy in "
        f"whose scope it was made. Received: {variable.path!r} of a strategy "
        f"on {shown}, written in `run` of one on "
        f"{shown_devices(mesh.devices)}. Call its own strategy's `run`, or "
        "return the value and `assign` it afterwards."
    )
