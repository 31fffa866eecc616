"""The layout of a train step's state in mapped programs."""

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies._types import Groups
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.spmd.replica_map import replicated_spec

WEIGHTS, OPTIMIZER = 0, 2
"""The indices of these groups in the state of a train step."""

Step = Callable[..., Any]
"""A step: `(written, read, data) -> (results, written, changed)`."""


class Layout:
    """A layout of a train step's state.

    This class is Keras's own layout: an array for each variable. Programs over
    the global batch and variables have it always. A subclass is another layout
    for mapped programs of train steps, which write all groups: with `convert`,
    to it and back.

    Attributes:
      local_sums: The places, in the optimizer's group, of accumulated gradients
        that are each replica's own.
      is_kept: Whether the mapped program that was traced last returns the state
        in this layout, and does not compute it in Keras's layout first.
    """

    local_sums: Sequence[int] = ()
    is_kept = True

    def convert(self, state: Groups, *, is_packed: bool) -> None:
        """Converts a state to this layout, or to Keras's; in place.

        Args:
          state: The groups of a state, in either layout: lists of arrays or of
            shapes.
          is_packed: Whether the result has this layout.
        """

    def differs(self, number: int, place: int) -> bool:
        """Returns whether a place of a group may be in another form."""
        del number, place
        return False

    def read(self, number: int, arrays: Group) -> Group:
        """Returns the arrays of a group in Keras's layout.

        Args:
          number: The index of the group.
          arrays: The group's arrays, in either layout; changed in place.
        """
        del number
        return arrays

    def find_shardings(
        self, shardings: list[list[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Returns the shardings of a state with this layout, from Keras's."""
        return shardings

    def find_specs(self) -> Any:
        """Returns the specs of the state in a mapped program."""
        return replicated_spec()

    def wrap_step(self, step: Step) -> Step:
        """Makes a step for Keras's layout take and return this one."""
        return step

    def wrap_loop(self, body: Step) -> Step:
        """Does what `wrap_step` does, for a step or a loop over steps."""
        return body


PLAIN = Layout()
