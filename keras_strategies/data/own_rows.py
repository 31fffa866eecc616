"""The rows of batches that a process reads, and no others."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.source import Cut, Part


class OwnRows:
    """Parts of batches any of whose rows can be read.

    Where a process wants no row, its part has none, but the shapes of others:
    for these it reads one row of one batch.
    """

    def __init__(self) -> None:
        self._none: Tree = None

    def part(
        self,
        read: Callable[[int, int], Tree],
        rows: int,
        cut: Cut,
        checksum: int,
    ) -> Part:
        """What the process wants of a batch.

        Args:
          read: Reads the rows from one number up to another.
          rows: Rows of the batch.
          cut: See `Cut`.
          checksum: See `Part`.
        """
        start, stop = cut(rows)
        data = self._none
        if start < stop or data is None:
            first = min(start, rows - 1)
            data = read(first, max(stop, first + 1))
        if self._none is None:
            self._none = jax.tree.map(lambda leaf: leaf[:0].copy(), data)
        if start == stop:
            data = self._none
        return Part(data=data, rows=rows, checksum=checksum)


def stack_rows(rows: Sequence[Tree], cure: str, where: str = "") -> Tree:
    """Rows as a batch.

    Args:
      rows: Nests of arrays.
      cure: What to do about rows that are unlike, for messages.
      where: Where they come from, for messages: ", from a file".

    Raises:
      ValueError: they are unlike.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except ValueError as error:
        raise ValueError(
            "The rows of a batch must have one structure and one shape. "
            f"Received: {[jax.tree.map(np.shape, row) for row in rows[:8]]}"
            f"{where}. {cure}"
        ) from error
