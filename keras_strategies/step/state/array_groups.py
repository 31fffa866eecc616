"""The groups of arrays that Keras's loops pass from step to step."""

from collections.abc import Sequence
from typing import Any, NoReturn

import keras

from keras_strategies.spmd.identity import IdentityMap
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.state.layout import PLAIN, Layout
from keras_strategies.step.state.local_sums import find_local_sums
from keras_strategies.step.state.stacked_blocks import find_stacked_blocks


class ArrayGroup(Sequence[Any]):
    """The arrays of a group, in a sequence whose entries Keras does not track.

    Keras stores the state on the model after every step. If the state were a
    list, Keras would wrap each entry to track it, which takes longer than a
    small step.

    Args:
      arrays: The arrays, as the next step takes them.
      layout: The layout that the arrays may have. When an entry of the sequence
        is first read that may be in another form, they are converted to Keras's
        layout.
      number: The index of the group in the state.

    Attributes:
      arrays: The arrays, as the next step takes them.
    """

    def __init__(
        self, arrays: Sequence[Any], layout: Layout = PLAIN, number: int = 0
    ) -> None:
        self.arrays = arrays
        self._layout, self._number = layout, number

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        if place in self._layout.places.get(self._number, ()):
            arrays = list(self.arrays)
            self._layout.convert({self._number: arrays}, is_packed=False)
            self.arrays, self._layout = arrays, PLAIN
        return self.arrays[place]


def find_layout(
    model: keras.Model, variables: tuple[Any, ...], mesh: ReplicaMesh
) -> Layout:
    """Finds the layout of the state of a model's train steps.

    Args:
      model: The model.
      variables: The groups of the train step's variables.
      mesh: The mesh of the replicas.
    """
    return (
        find_local_sums(model, variables, mesh)
        or find_stacked_blocks(model, variables, mesh)
        or PLAIN
    )


def wrap_groups(
    state: Sequence[Sequence[Any]], layout: Layout
) -> tuple[ArrayGroup, ...]:
    """Makes the groups of a step's state, for Keras."""
    return tuple(
        group
        if isinstance(group, ArrayGroup)
        else ArrayGroup(group, layout, number)
        for number, group in enumerate(state)
    )


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


def get_arrays(groups: Sequence[Any]) -> list[Any]:
    """Returns the lists that hold the arrays of a state.

    Args:
      groups: The groups of the state: `ArrayGroup`s or lists.
    """
    return [getattr(group, "arrays", group) for group in groups]


def find_model_holders(
    model: keras.Model, groups: tuple[str, ...], last: Sequence[Any] | None
) -> list[Any]:
    """Returns lists that may hold the arrays of a model's states."""
    holders = [] if last is None else [get_arrays(last)]
    keras_state = getattr(model, "_jax_state", None)
    if keras_state and all(name in keras_state for name in groups):
        keras_values = [keras_state[name] for name in groups]
        if last is None or keras_values[0] is not last[0]:
            holders.append(get_arrays(keras_values))
    return holders
