"""The groups of arrays that Keras's loops pass from step to step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import keras

from keras_strategies.hooks.local_sums import (
    OPTIMIZER,
    LocalSums,
    find_local_sums,
)
from keras_strategies.spmd.identity import IdentityMap
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.stacked_state import (
    StackedState,
    find_stacked_state,
)


class ArrayGroup(Sequence[Any]):
    """The arrays of a group, in a sequence whose entries Keras does not track.

    Keras stores the state on the model after every step. If the state were a
    list, Keras would wrap each entry to track it, which takes longer than a
    small step.

    Args:
      arrays: The arrays, as the next step takes them.
      local_sums: The accumulators that may be stacked in the arrays, or None.
        The entries of the sequence are their sums, computed when first read.
      stacks: The weights that may be stacked in the arrays, or None. Stacks
        are divided when an entry of one is first read.
      number: The index of the group in the state.

    Attributes:
      arrays: The arrays, as the next step takes them.
      sums: The sums at the places of stacked accumulators, and None elsewhere.
        Empty if the sums were not computed.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        local_sums: LocalSums | None = None,
        stacks: StackedState | None = None,
        number: int = 0,
    ) -> None:
        self.arrays = arrays
        self.sums: list[Any] = []
        self._local_sums = local_sums
        self._stacks, self._number = stacks, number

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        stacks, number = self._stacks, self._number
        if stacks is not None and stacks.has_stack(number, place):
            self.arrays = list(self.arrays)
            stacks.unstack(number, self.arrays)
            self._stacks = None
        if self._local_sums is not None and not self.sums:
            self.sums = self._local_sums.find_sums(list(self.arrays))
        total = self.sums[index] if self.sums else None
        return self.arrays[index] if total is None else total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forms:
    """The forms, other than the variables', in which steps may store arrays.

    Attributes:
      local_sums: The accumulators that replicas sum only in updates, or None.
      stacks: The weights of equal blocks that stay stacked, or None.
    """

    local_sums: LocalSums | None = None
    stacks: StackedState | None = None


PLAIN = Forms()


def find_forms(
    model: keras.Model, variables: tuple[Any, ...], mesh: ReplicaMesh
) -> Forms:
    """Finds the arrays that the train steps of a model store in another form.

    Args:
      model: The model.
      variables: The groups of the train step's variables.
      mesh: The mesh of the replicas.
    """
    local_sums = find_local_sums(model, variables, mesh)
    if local_sums is not None:
        return Forms(local_sums=local_sums)
    return Forms(stacks=find_stacked_state(model, variables, mesh))


def wrap_groups(
    state: Sequence[Sequence[Any]], forms: Forms
) -> tuple[ArrayGroup, ...]:
    """Makes the groups of a step's state, for Keras."""

    def wrap(number: int, group: Sequence[Any]) -> ArrayGroup:
        if isinstance(group, ArrayGroup):
            return group
        sums = forms.local_sums if number == OPTIMIZER else None
        return ArrayGroup(group, sums, forms.stacks, number)

    return tuple(wrap(i, group) for i, group in enumerate(state))


def regroup(
    state: Sequence[Any],
    variables: Sequence[Any],
    now: Sequence[Sequence[keras.Variable]],
) -> Sequence[Any]:
    """Returns a state in the groups to which its variables belong now.

    Keras takes the values from the variables by the model's groups, and writes
    them back by the groups of that time.

    Args:
      state: The state, from Keras or from the last step.
      variables: The groups of variables for which the step was made.
      now: The model's present groups of the same variables.
    """
    if not all(isinstance(group, ArrayGroup) for group in state):
        return state
    values = IdentityMap(
        pair
        for group, arrays in zip(variables, state, strict=True)
        for pair in zip(group, arrays, strict=True)
    )
    return [[values[variable] for variable in group] for group in now]


def refuse_changed(variable: keras.Variable) -> NoReturn:
    """Raises ValueError: `trainable` changed after a step was made."""
    raise ValueError(
        "`trainable` must not change while `fit` or a similar method runs. "
        f"Received: {variable.path!r}, which now has "
        f"trainable={variable.trainable}. Let the method end, for example with "
        "`epochs`, change `trainable`, compile the model again, and call the "
        "method again; `fit` has `initial_epoch`."
    )


def find_holders(groups: Sequence[Any]) -> list[list[Any]]:
    """Returns the lists that hold the arrays of a state.

    Args:
      groups: The groups of the state: `ArrayGroup`s or lists.
    """
    arrays = [getattr(group, "arrays", group) for group in groups]
    return [arrays, [getattr(group, "sums", []) for group in groups]]
