"""The groups of arrays that Keras's loops pass from step to step."""

import functools
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
    """

    def __init__(
        self, arrays: Sequence[Any], local_sums: LocalSums | None = None
    ) -> None:
        self.arrays = arrays
        self._local_sums = local_sums

    @functools.cached_property
    def _values(self) -> Sequence[Any]:
        if self._local_sums is None:
            return self.arrays
        return self._local_sums.convert(list(self.arrays), is_stacked=False)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]


def wrap_groups(
    state: Sequence[Sequence[Any]], local_sums: LocalSums | None
) -> tuple[ArrayGroup, ...]:
    """Makes the groups of a step's state, for Keras."""
    return tuple(
        ArrayGroup(group, local_sums if i == OPTIMIZER else None)
        for i, group in enumerate(state)
    )
