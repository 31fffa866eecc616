"""The trace of a replica's call in `run`, its results, and checks of values.

The functions of this module are called while the program is traced. In debug
mode they are called once for each replica, with the replica's arrays.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.hooks import variables_used
from keras_strategies.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.step_context import (
    ReplicaScope,
    StepContext,
    StepFacts,
    StepFlags,
    step_scope,
)
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.passes.specs import Axis
from keras_strategies.run.function_keys import make_key, open_nest
from keras_strategies.spmd.mesh import ReplicaMesh, format_devices
from keras_strategies.spmd.replica_map import all_max, all_min, as_number
from keras_strategies.spmd.values import Shapes
from keras_strategies.step.ragged import replica_merge
from keras_strategies.step.ragged.ragged_call import BranchResult
from keras_strategies.variables.shardings import get_placement


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceReport:
    """A report of the trace of a `RunProgram`.

    The program returns it as a static result, in addition to its arrays.

    Attributes:
      structure: The structure of the user's results.
      constants: For each leaf of the results, None if it is an array, and else
        a list of its values as returned by `merge_constants`.
      summed: Positions of the arrays that are also summed over the replicas.
      unchecked: Positions of written variables to which all replicas must
        write the same value. The caller checks that.
      shapes: For each array, its shape on each replica; None if all are equal.
    """

    structure: Any
    constants: list[list[Any] | None]
    summed: list[int]
    unchecked: list[int]
    shapes: list[Shapes | None]


def read_constant(leaf: object) -> list[Any] | None:
    """Returns the value of a result that is not an array, in a list.

    Returns None if the result is an array.

    Raises:
      TypeError: if the result is neither an array nor a supported value.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return None
    if leaf is None or isinstance(
        leaf, bool | int | float | complex | str | bytes | keras.Variable
    ):
        return [leaf]
    raise TypeError(
        "A function given to `run` must return arrays, numbers, strings or "
        "None, in nests of tuples, lists and dicts. Received: a result of type "
        f"{type(leaf).__name__}. Return its arrays instead."
    )


def merge_constants(structures: list[Any]) -> list[list[Any] | None]:
    """Combines the results that are not arrays, from all variants of a call.

    A function is traced in several variants if the replicas have different
    numbers of rows. In debug mode the call of each replica is a variant.

    Args:
      structures: Each variant's `BranchResult.structure`.

    Returns:
      A list with an entry for each leaf: None if the leaf is an array; a list
      of one value if all variants returned the same; else a list of the
      numbers that the variants returned.

    Raises:
      ValueError: if the variants return nests of different structures.
    """
    trees = [tree for tree, _ in structures]
    kinds = [[c is None for c in constants] for _, constants in structures]
    if any(t != trees[0] for t in trees) or any(k != kinds[0] for k in kinds):
        shown = [
            jax.tree.unflatten(tree, ["array" if k else "other" for k in kind])
            for tree, kind in zip(trees, kinds, strict=True)
        ]
        _refuse(shown)
    result: list[list[Any] | None] = []
    for column in zip(*[constants for _, constants in structures], strict=True):
        if column[0] is None:
            result.append(None)
            continue
        values = [value for (value,) in column]
        if len(set(map(make_key, values))) == 1:
            result.append(values[:1])
        elif all(isinstance(v, bool | int | float | complex) for v in values):
            result.append(values)
        else:
            _refuse(values)
    return result


def rebuild_nest(
    structure: PyTreeDef,
    constants: list[list[Any] | None],
    arrays: Iterable[Any],
    differing: Callable[[list[Any]], Any],
) -> Tree:
    """Rebuilds the nest of results that the function returned.

    Args:
      structure: The structure of the nest.
      constants: The result of `merge_constants`.
      arrays: The results that are arrays.
      differing: A function that makes one result from a list of the different
        numbers that the variants returned.

    Returns:
      A nest of arrays, `PerReplica` and constants.
    """
    rest = iter(arrays)

    def leaf(values: list[Any] | None) -> Leaf:
        if values is None:
            return next(rest)
        return values[0] if len(values) == 1 else differing(values)

    return jax.tree.unflatten(structure, map(leaf, constants))


def _refuse(results: list[Any]) -> NoReturn:
    raise ValueError(
        "All replicas must return results of the same structure. Received: "
        f"{results}. Return the same nest on every replica."
    )


_SUMMED = 64
"""The largest size of a result that is also summed in the program."""


def make_step(mesh: ReplicaMesh, *, is_update: bool = False) -> StepContext:
    """Makes the step context for a function given to `run`."""
    return StepContext(
        facts=StepFacts(mesh=mesh, rows=1, is_local=True),
        flags=StepFlags(sees_global_batch=True, in_update=is_update),
    )


@contextlib.contextmanager
def replica_tracing(
    step: StepContext, replica_scope: ReplicaScope
) -> Iterator[None]:
    """Installs the hooks and contexts in which a replica's call is traced."""
    with (
        trace_hooks(),
        kernels_for(step.facts.mesh),
        variables_used.chain_scopes(),
        step_scope(step),
        replica_scope(step),
    ):
        yield


def collect_call(
    step: StepContext,
    scope: keras.StatelessScope,
    results: Tree,
    variables: list[keras.Variable],
    folded: list[Any],
) -> BranchResult:
    """Collects the results and new values of a call of the user's function.

    Args:
      step: The context of the call.
      scope: The scope in which the function was called.
      results: The function's results.
      variables: The variables whose values are collected.
      folded: The variables' values before the call, in which seeds are those of
        this replica.
    """
    new = [scope.get_current_value(v) for v in variables]

    def is_none(value: object) -> bool:
        return value is None

    nest = open_nest(results, is_none)
    leaves, structure = jax.tree.flatten(nest, is_leaf=is_none)
    constants = [read_constant(leaf) for leaf in leaves]
    outputs = [
        jnp.asarray(leaf)
        for leaf, constant in zip(leaves, constants, strict=True)
        if constant is None
    ]
    return replica_merge.make_branch_result(
        step, variables, (folded, new), outputs, (structure, constants)
    )


def make_report(
    mesh: ReplicaMesh,
    outputs: list[Any],
    branches: list[BranchResult],
    shapes: list[list[tuple[int, ...]]] | None,
    num_written: int,
) -> TraceReport:
    """Makes the `TraceReport` of a `RunProgram`.

    Args:
      mesh: The mesh of the replicas.
      outputs: The results that are arrays.
      branches: The result of the call in each variant's trace.
      shapes: For each replica, the shapes of its outputs; or None if all
        replicas have the shapes of `outputs`.
      num_written: The number of written variables. They come first in the lists
        of `branches`.

    Raises:
      ValueError: if the variants return nests of different structures.
    """
    structures = [branch.structure for branch in branches]
    columns = zip(*(shapes or [[()] * len(outputs)]), strict=True)
    differing = [column if len(set(column)) > 1 else None for column in columns]
    places = range(len(outputs) if mesh.num_replicas > 1 else 0)
    small = [k for k in places if outputs[k].size <= _SUMMED]
    return TraceReport(
        structure=structures[0][0],
        constants=merge_constants(structures),
        summed=[k for k in small if differing[k] is None],
        unchecked=[k for k in find_unaggregated(branches) if k < num_written],
        shapes=differing,
    )


def is_same(value: Array, axis: Axis) -> jax.Array:
    """Computes whether all replicas have the same value.

    Two NaNs count as equal.

    Returns:
      A scalar boolean.
    """
    # The replicas' values are equal if their maximum and minimum are equal.
    # NaN would make both NaN, so it is replaced by 0, and the positions of
    # NaN are compared separately.
    is_nan = value != value
    number = jnp.where(is_nan, jnp.zeros_like(value), value)
    number = as_number(number)
    highest, lowest = all_max(number, axis), all_min(number, axis)
    nans = is_nan.astype("int32")
    same_nans = all_max(nans, axis) == all_min(nans, axis)
    return jnp.all((highest == lowest) & same_nans)


def find_unaggregated(branches: list[BranchResult]) -> list[int]:
    """Returns the indices of variables that all replicas must write equally.

    These are variables that a replica wrote and that have no aggregation.
    """
    columns = zip(*(b.is_unaggregated for b in branches), strict=True)
    return [k for k, column in enumerate(columns) if any(column)]


def refuse_difference(variable: keras.Variable) -> None:
    """Raises ValueError: replicas wrote different values to a variable."""
    raise ValueError(
        "The replicas wrote different values to a variable that has "
        f"no aggregation. Received: {variable.path!r} with "
        "aggregation='none' (its value is now the mean over the replicas or, "
        "for integers, the value of replica 0). Create the variable with "
        'aggregation="sum", "mean" or "only_first_replica".'
    )


def refuse_foreign(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Raises RuntimeError if a variable is on another strategy's devices.

    Using it would move it or its copies to the devices of `mesh`, away from the
    other variables of its own strategy.
    """
    devices = getattr(variable._layout, "device_set", None)
    placement = get_placement(variable)
    is_sharded = placement is not None and placement.mesh is not mesh
    if devices is None or (devices == set(mesh.devices) and not is_sharded):
        return
    theirs = sorted(devices, key=lambda device: device.id)
    shown = format_devices(theirs)
    if is_sharded:
        shown += ", which shards it"
    raise RuntimeError(
        "Mixing strategies: in `run` a variable can only be written by the "
        f"strategy that created it. Received: {variable.path!r} of a strategy "
        f"on {shown}, written in `run` of a strategy on "
        f"{format_devices(mesh.devices)}. Call `run` of the variable's own "
        "strategy, or return the value from `run` and `assign` it afterwards."
    )
