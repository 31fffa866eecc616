"""What a feed reads: batches of rows, of which a process takes its share."""

import abc
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from keras_strategies._core.batches import num_rows
from keras_strategies.data.order import Order

Tree = Any
Cut = Callable[[int], tuple[int, int]]
"""Of a global batch with that many rows, the first and one past the last row
that this process wants."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process read of a batch.

    Attributes:
      data: A nest of host arrays: this process's rows, in their order; maybe
        none, but with the shapes and dtypes of the others.
      rows: Number of rows of the batch, those of all processes together. Of
        a source that is a process's own, those of `data`.
      mark: A checksum of the first and the last row of the whole batch, if
        it was computed, to tell whether all processes see the same.
      counts: Of a source that is a process's own: how many of the rows each
        of its replicas gets, if that is not left to the feed.
    """

    data: Tree
    rows: int
    mark: int | None = None
    counts: tuple[int, ...] | None = None


class Source(abc.ABC):
    """Batches of one order of rows.

    Most sources are *global*: every process could read any row, and reads
    those that `cut` tells it to. One that is *own* gives rows that no other
    process reads (its files, its shard).

    Attributes:
      kind: What the user gave, for messages: "numpy arrays".
      is_own: Whether the rows are this process's own.
      is_planned: Whether all lengths are known and reading cannot fail: then
        processes need not tell each other what they have read.
      batch_size: Rows of a whole global batch, if known. A source that is
        own yields batches of any size: the feed regroups their rows to this
        process's share of `batch_size`.
      num_batches: Number of global batches in an epoch, if known.
      order: The orders that it shuffles its epochs in, if it does so itself.
    """

    kind: ClassVar[str] = "data"
    is_own: bool = False
    is_planned: bool = False
    batch_size: int | None = None
    num_batches: int | None = None
    order: Order | None = None

    @abc.abstractmethod
    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """Reads an epoch.

        Args:
          epoch: Number of the epoch, from 0; with the source's seed it
            determines the order of the rows.
          start: Number of global batches (of a source that is own: batches
            of its own) to leave out at the beginning.
          cut: Which rows of a global batch this process wants; a source that
            is own ignores it.

        Yields:
          The batches, in their order, not padded.
        """

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Called before an epoch is read; the arguments are those of `read`.

        By loops of models alone, and never twice without `end_epoch`.
        """
        del epoch, start

    def end_epoch(self) -> None:
        """Called after an epoch, whether it was read to its end or not."""
        return


def take(batch: Tree, cut: Cut, *, is_marked: bool = False) -> Part:
    """The rows of a whole global batch that a process wants.

    Args:
      batch: The batch.
      cut: See `Cut`.
      is_marked: Whether to compute the part's `mark`: for data that every
        process reads in an order which nothing but itself determines.
    """
    rows = num_rows(batch)
    mark = None
    if is_marked:
        mark = 0
        for leaf in jax.tree.leaves(batch):
            for row in (leaf[0], leaf[-1]):
                mark = zlib.crc32(np.ascontiguousarray(row).tobytes(), mark)
    start, stop = cut(rows)
    if (start, stop) != (0, rows):
        batch = jax.tree.map(lambda leaf: leaf[start:stop], batch)
    return Part(data=batch, rows=rows, mark=mark)
