"""The groups of arrays that Keras's loops pass from step to step."""

from collections.abc import Sequence
from typing import Any

from keras_strategies.keras_bridge.accumulation.local_sums import (
    OPTIMIZER,
    LocalSums,
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

    Attributes:
      arrays: The arrays, as the next step takes them.
      sums: The sums at the places of stacked accumulators, and None elsewhere.
        Empty if the sums were not computed.
    """

    def __init__(
        self, arrays: Sequence[Any], local_sums: LocalSums | None = None
    ) -> None:
        self.arrays = arrays
        self.sums: list[Any] = []
        self._local_sums = local_sums

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if self._local_sums is not None and not self.sums:
            self.sums = self._local_sums.find_sums(list(self.arrays))
        total = self.sums[index] if self.sums else None
        return self.arrays[index] if total is None else total


def wrap_groups(
    state: Sequence[Sequence[Any]], local_sums: LocalSums | None
) -> tuple[ArrayGroup, ...]:
    """Makes the groups of a step's state, for Keras."""
    return tuple(
        group
        if isinstance(group, ArrayGroup)
        else ArrayGroup(group, local_sums if i == OPTIMIZER else None)
        for i, group in enumerate(state)
    )


def find_holders(groups: Sequence[Any]) -> list[list[Any]]:
    """Returns the lists that hold the arrays of a state.

    Args:
      groups: The groups of the state: `ArrayGroup`s or lists.
    """
    arrays = [getattr(group, "arrays", group) for group in groups]
    return [arrays, [getattr(group, "sums", []) for group in groups]]
