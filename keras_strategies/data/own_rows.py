"""Process-local rows of batches, read without the other rows."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.source import Cut, Part


class ProcessRows:
    """A maker of `Part`s from batches any of whose rows can be read.

    A part without rows still needs the shapes and dtypes of the others, so the
    first part reads at least one row.
    """

    def __init__(self) -> None:
        self._no_rows: Tree = None

    def make_part(
        self,
        read: Callable[[int, int], Tree],
        rows: int,
        cut: Cut,
        checksum: int,
    ) -> Part:
        """Returns this process's rows of a batch.

        Args:
          read: A function of two row numbers that reads the rows from the first
            up to the second.
          rows: Number of rows of the batch.
          cut: See `Cut`.
          checksum: See `Part`.
        """
        start, stop = cut(rows)
        data = self._no_rows
        if start < stop or data is None:
            first = min(start, rows - 1)
            data = read(first, max(stop, first + 1))
        if self._no_rows is None:
            self._no_rows = jax.tree.map(lambda leaf: leaf[:0].copy(), data)
        if start == stop:
            data = self._no_rows
        return Part(data=data, rows=rows, checksum=checksum)


def stack_rows(rows: Sequence[Tree], cure: str, where: str = "") -> Tree:
    """Stacks rows to a batch.

    Args:
      rows: Nests of arrays.
      cure: What to do about rows that differ, for messages.
      where: The origin of the rows, for messages: ", from a file".

    Raises:
      ValueError: if the rows differ in structure or shape.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except ValueError as error:
        raise ValueError(
            "The rows of a batch must have one structure and one shape. "
            f"Received: {[jax.tree.map(np.shape, row) for row in rows[:8]]}"
            f"{where}. {cure}"
        ) from error
