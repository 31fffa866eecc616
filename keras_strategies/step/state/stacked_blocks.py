"""The weights of equal blocks, which the steps of `fit` keep stacked.

A step that computes equal blocks in a loop reads the blocks' weights from one
array. Between the steps of `fit`, such weights and their optimizer slots are
the slices of stacks: no step stacks them, and an optimizer update of all blocks
is one operation. The variables get their own arrays when they are read.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies.hooks.summands import unwrap
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.kernels.scanned_blocks import find_columns
from keras_strategies.passes.slices.batching import batch_slices
from keras_strategies.passes.slices.comparison import Slice
from keras_strategies.passes.specs import Sharded
from keras_strategies.passes.stages import get_shape
from keras_strategies.spmd.buffers import choose_buffering
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import replica_map
from keras_strategies.step.state.layout import (
    OPTIMIZER,
    WEIGHTS,
    Layout,
    Step,
)
from keras_strategies.variables.shardings import (
    get_sharding,
    get_spec,
)


class StackedBlocks(Layout):
    """The places in a train step's state whose arrays may be stacked.

    The arrays of some places of a group form a column. If they are stacked, the
    array at the first place is the stack, and None is at the other places.

    Args:
      columns: For each group, the places of each column.
      variables: The groups of the step's variables.
      mesh: The mesh of the replicas.

    Attributes:
      is_kept: Whether the program that was traced last keeps any stack.
        Otherwise its steps have to stack all weights, because the blocks are
        not computed in a loop, for example because they differ.
    """

    def __init__(
        self,
        columns: dict[int, list[list[int]]],
        variables: Sequence[Sequence[keras.Variable]],
        mesh: ReplicaMesh,
    ) -> None:
        self._columns = columns
        self.places = {
            number: {place for column in found for place in column}
            for number, found in columns.items()
        }
        self._variables = variables
        self._mesh = mesh
        self.is_kept = False

    def convert(self, state: Mapping[int, Group], *, is_packed: bool) -> None:
        """Stacks the arrays of the columns, or divides the stacks; in place.

        The arrays that are replaced are deleted.
        """
        change = self._stack if is_packed else self._unstack
        for number, group in state.items():
            change(number, group)

    def _stack(self, number: int, group: Group) -> None:
        for column in self._columns.get(number, ()):
            arrays = [group[i] for i in column]
            if arrays[1] is None:
                continue
            stacker = _make_stacker(self._sharding(number, column))
            group[column[0]] = self._run(stacker, *arrays)
            for i in column[1:]:
                group[i] = None

    def _unstack(self, number: int, group: Group) -> None:
        """Divides the stacks of a group, and deletes them; in place."""
        for column in self._columns.get(number, ()):
            stack = group[column[0]]
            if group[column[1]] is not None:
                continue
            variable = self._variables[number][column[0]]
            unstacker = _make_unstacker(get_sharding(variable, self._mesh))
            arrays = self._run(unstacker, stack)
            for i, array in zip(column, arrays, strict=True):
                group[i] = array

    def _run(self, program: Any, *arrays: Any) -> Any:
        """Runs a program, and deletes its arguments; only shapes of shapes."""
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            return program.eval_shape(*arrays)[1]
        _, results = dispatch(self._mesh, program, *arrays)
        for array in arrays:
            array.delete()
        return results

    def find_shardings(
        self, shardings: list[list[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Returns the shardings of a state with stacks; None for no array."""
        found = [list(group) for group in shardings]
        for number, columns in self._columns.items():
            for column in columns:
                found[number][column[0]] = self._sharding(number, column)
                for i in column[1:]:
                    found[number][i] = None
        return found

    def wrap_step(self, step: Step) -> Step:
        """Makes a step take and return a state with stacks."""

        def call(state: Sequence[Group], *args: Any) -> tuple[Any, ...]:
            slices = [self._slice_group(i, g) for i, g in enumerate(state)]
            inputs, structure = jax.tree.flatten((slices, *args))
            structures: list[Any] = []

            def flat(*leaves: Any) -> list[Any]:
                results = step(*jax.tree.unflatten(structure, leaves))
                structures.append(jax.tree.structure(results))
                return jax.tree.leaves(results)

            traced = jax.make_jaxpr(flat)(*map(_get_shape, inputs))
            mapper = functools.partial(replica_map, mesh=self._mesh)
            outputs = batch_slices(traced, inputs, mapper)
            (result_structure,) = structures
            results, new, *others = jax.tree.unflatten(
                result_structure, outputs
            )
            self.is_kept = any(
                _find_stack([new[WEIGHTS][i] for i in column])
                for column in self._columns[WEIGHTS]
            )
            stacks = [self._stack_slices(i, g) for i, g in enumerate(new)]
            return jax.tree.map(_get_value, (results, stacks, *others))

        return call

    def _slice_group(self, number: int, group: Group) -> Group:
        group = list(group)
        for column in self._columns.get(number, ()):
            stack = group[column[0]]
            for k, i in enumerate(column):
                group[i] = Slice(stack, k, len(column))
        return group

    def _stack_slices(self, number: int, group: Group) -> Group:
        group = list(group)
        for column in self._columns.get(number, ()):
            values = [group[i] for i in column]
            found = _find_stack(values)
            stack = found[0] if found else jnp.stack([*map(_get_value, values)])
            for i in column:
                group[i] = None
            group[column[0]] = stack
        return group

    def _sharding(self, number: int, column: Sequence[int]) -> NamedSharding:
        sharding = get_sharding(self._variables[number][column[0]], self._mesh)
        spec = sharding.spec
        stacked = PartitionSpec(None, *spec) if any(spec) else PartitionSpec()
        kind = sharding.memory_kind
        return NamedSharding(sharding.mesh, stacked, memory_kind=kind)


def _get_shape(value: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(value, Slice):
        return get_shape(value)
    return jax.ShapeDtypeStruct(value.stack.shape[1:], value.stack.dtype)


def _get_value(value: Any) -> Any:
    return value.stack[value.index] if isinstance(value, Slice) else value


def _find_stack(values: Sequence[Any]) -> list[Any]:
    """Returns a list of the stack whose slices values are; empty if none."""
    first = values[0]
    if isinstance(first, Slice) and all(
        isinstance(x, Slice) and x.stack is first.stack and x.index == i
        for i, x in enumerate(values)
    ):
        return [first.stack]
    return []


@functools.cache
def _make_stacker(sharding: NamedSharding) -> Any:
    def stack_weights(*arrays: Any) -> tuple[Any, Any]:
        arrays = jax.device_put(arrays, jax.memory.Space.Device)
        return jnp.zeros(()), jnp.stack(arrays)

    return jax.jit(stack_weights, out_shardings=(None, sharding))


@functools.cache
def _make_unstacker(sharding: NamedSharding) -> Any:
    def unstack_weights(stack: Any) -> tuple[Any, list[Any]]:
        stack = jax.device_put(stack, jax.memory.Space.Device)
        return jnp.zeros(()), list(stack)

    return jax.jit(unstack_weights, out_shardings=(None, sharding))


def find_stacked_blocks(
    model: keras.Model,
    variables: Sequence[Sequence[keras.Variable]],
    mesh: ReplicaMesh,
) -> StackedBlocks | None:
    """Finds the arrays that the train steps of a model keep stacked.

    Args:
      model: The model.
      variables: The groups of the train step's variables.
      mesh: The mesh of the replicas.

    Returns:
      The places of these arrays, or None if there are none. An optimizer that
      applies gradients within a branch is computed on separate arrays.
    """
    optimizer = model.optimizer
    is_branch = unwrap(optimizer) is not optimizer or getattr(
        optimizer, "gradient_accumulation_steps", None
    )
    if model.run_eagerly or not model.built or is_branch:
        return None
    weights = {id(v): i for i, v in enumerate(variables[WEIGHTS])}
    slots = {id(v): i for i, v in enumerate(variables[OPTIMIZER])}
    columns: dict[int, list[list[int]]] = {WEIGHTS: [], OPTIMIZER: []}

    def add(
        group: int, places: dict[int, int], column: Sequence[keras.Variable]
    ) -> bool:
        """Adds a column whose variables are all in a group, and new."""
        found = [places.pop(id(v), -1) for v in column]
        is_added = -1 not in found and _fit(column, mesh)
        if is_added:
            columns[group].append(found)
        return is_added

    for column in find_columns(model, mesh):
        if _are_alone(column, mesh) and add(WEIGHTS, weights, column):
            for stack in _find_slots(optimizer, column):
                add(OPTIMIZER, slots, stack)
    if not columns[WEIGHTS]:
        return None
    return StackedBlocks(columns, variables, mesh)


def _fit(column: Sequence[keras.Variable], mesh: ReplicaMesh) -> bool:
    """Returns whether the arrays of some variables can be stacked."""
    kinds = {(tuple(v.shape), str(v.dtype), get_spec(v, mesh)) for v in column}
    return len(kinds) == 1


def _are_alone(column: Sequence[keras.Variable], mesh: ReplicaMesh) -> bool:
    """Returns whether no buffer combines weights' gradients to sum them."""
    is_sharded = isinstance(get_spec(column[0], mesh), Sharded)
    return is_sharded or choose_buffering(mesh) is None


def _find_slots(
    optimizer: Any, column: Sequence[keras.Variable]
) -> Iterator[list[keras.Variable]]:
    """Yields the optimizer slots of some weights, one list for each slot."""
    weights = getattr(optimizer, "_trainable_variables", [])
    places = {id(v): i for i, v in enumerate(weights)}
    if not all(id(v) in places for v in column):
        return
    for slots in vars(optimizer).values():
        is_of_weights = isinstance(slots, list) and len(slots) == len(weights)
        if is_of_weights and slots is not weights:
            found = [slots[places[id(v)]] for v in column]
            if all(isinstance(slot, keras.Variable) for slot in found):
                yield found
