"""Regrouping of process-local rows into batches of another size."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.batch_spec import find_row_kind
from keras_strategies.data.source import Part
from keras_strategies.spmd.batches import num_rows


class Rebatcher:
    """Regroups the rows of batches of any size into batches of other sizes."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self._parts = parts
        self._left: list[Tree] = []
        self._count = 0

    def take(self, count: int) -> Tree | None:
        """Returns the next `count` rows as one batch.

        Returns fewer rows at the end of the data, or if the rows after them
        have different shapes. Returns None if no rows are left.
        """
        # At least one row is read, so that the shapes are known.
        while self._count < max(count, 1):
            part = next(self._parts, None)
            if part is None:
                break
            if num_rows(part.data):
                self._left.append(part.data)
                self._count += part.rows
        if not self._count:
            return None
        taken, missing = [], count
        if missing == 0:
            return _slice_rows(self._left[0], 0, 0)
        while missing and self._left:
            first = self._left[0]
            if taken and find_row_kind(taken[0]) != find_row_kind(first):
                # The rows have different shapes (for example, because they are
                # padded to another length), so they cannot be part of the same
                # batch.
                break
            rows = num_rows(first)
            if rows <= missing:
                taken.append(self._left.pop(0))
            else:
                taken.append(_slice_rows(first, 0, missing))
                self._left[0] = _slice_rows(first, missing, rows)
            count_taken = min(rows, missing)
            missing -= count_taken
            self._count -= count_taken
        if len(taken) == 1:
            return taken[0]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *taken)


def peek(
    parts: Iterator[Part], count: int
) -> tuple[list[Part], Iterator[Part]]:
    """Returns the first `count` parts, and an iterator over all parts.

    If reading one of the first parts raises an error, the iterator raises it
    after the parts that precede it.
    """
    first: list[Part] = []
    try:
        first.extend(itertools.islice(parts, count))
    except Exception as error:
        return first, itertools.chain(first, _raise_later(error))
    return first, itertools.chain(first, parts)


def _raise_later(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _slice_rows(batch: Tree, start: int, stop: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)
