"""The layout of a train step's state in mapped programs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

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
      places: For each group that may differ from Keras's layout, the places
        of the arrays that do.
      is_kept: Whether the mapped program that was traced last returns the state
        in this layout, and does not compute it in Keras's layout first.
    """

    local_sums: Sequence[int] = ()
    places: Mapping[int, Collection[int]] = {}
    is_kept = True

    def convert(self, state: Mapping[int, Group], *, is_packed: bool) -> None:
        """Converts groups to this layout, or to Keras's; in place.

        Args:
          state: All groups of a state that may differ from Keras's layout, or
            one of them, by index, in either layout: lists of arrays or of
            shapes.
          is_packed: Whether the result has this layout.
        """

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
