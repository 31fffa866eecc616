"""Reading only this process's rows of a batch, not the entire batch."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.source import Cut, Part


class ProcessRows:
    """Makes `Part`s from batches whose rows can be read individually.

    A process that has no rows in a batch still needs the shapes and dtypes of
    the other processes' rows. So at least one row is read for the first part.
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
        """Reads and returns only this process's rows of a batch.

        Args:
          read: A function `read(start, stop)` that returns the rows from
            `start` up to, but not including, `stop`.
          rows: Number of rows of the global batch.
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
    """Stacks rows into a batch.

    Args:
      rows: The rows, as nests of arrays with equal structure and shapes.
      cure: Advice to the user, which ends the error message if the rows differ.
      where: A text that is inserted into the error message, to show where the
        rows come from, such as ", from a file".

    Raises:
      ValueError: if the rows differ in structure or shape.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except ValueError as error:
        raise ValueError(
            "All rows of a batch must have the same structure and shapes. "
            "Received: rows with the shapes "
            f"{[jax.tree.map(np.shape, row) for row in rows[:8]]}"
            f"{where}. {cure}"
        ) from error
