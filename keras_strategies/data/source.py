"""Sources: batches of rows, of which each process reads its share."""

import abc
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from keras_strategies._core import host_arrays
from keras_strategies._core.batches import num_rows
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.shuffled_orders import Order
from keras_strategies.data.source_summary import Outline

Tree = Any
_NUM_MARKED = 16
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


class Passes:
    """How often a dataset was read, by all loops together.

    Attributes:
      next: Number of the epoch that the next loop begins with.
    """

    def __init__(self) -> None:
        self.next = 0

    def reach(self, epoch: int) -> None:
        """Says that a loop has begun all epochs before that one."""
        self.next = max(self.next, epoch)


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
        process's share of `batch_size`, or where that is not known of the
        first batch's rows.
      likely_size: Rows of a whole global batch if functions that are mapped
        over batches leave their number as it is.
      num_batches: Number of global batches in an epoch, if known.
      order: The orders that it shuffles its epochs in, if it does so itself.
      is_peeked: Whether what is read now only shows shapes. Data that can be
        read once alone give it again to the reader that follows.
    """

    kind: ClassVar[str] = "data"
    is_own: bool = False
    is_planned: bool = False
    batch_size: int | None = None
    likely_size: int | None = None
    num_batches: int | None = None
    order: Order | None = None
    is_peeked: bool = False

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes over its dataset; its own, if it is not given others."""
        return Passes()

    def facts(self) -> dict[str, Any]:
        """What the sources of all processes must have alike."""
        return {
            "data": self.kind,
            "own rows": self.is_own,
            "batch_size": self.batch_size,
            "num_batches": None if self.is_own else self.num_batches,
        }

    def outline(self) -> Outline:
        """What `Strategy.explain_input` shows of it; reads nothing."""
        if self.is_own:
            return Outline(
                applied=AutoShardPolicy.OFF,
                reason="each process has rows of its own",
            )
        return Outline(
            applied=AutoShardPolicy.DATA, reason="it is not split by files"
        )

    @property
    def mark(self) -> int | None:
        """A checksum of some rows: the same where the same was given.

        None if the parts have marks, or need none.
        """
        return None

    @property
    def seed(self) -> str | int | None:
        """What the epochs' orders are drawn from; None if that is not ours."""
        return None if self.order is None else self.order.seed

    def restart(self, seed: str | int | None) -> None:
        """Takes the orders of another one; before anything is read.

        Args:
          seed: What `seed` of another source of the same data was.

        Raises:
          ValueError: it is of another kind of data.
        """
        if self.order is not None and seed is not None:
            self.order.restart(str(seed))

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


def all_rows(rows: int) -> tuple[int, int]:
    """A `Cut` that wants every row."""
    return 0, rows


def take(
    batch: Tree, cut: Cut, *, is_marked: bool = False, is_copied: bool = False
) -> Part:
    """The rows of a whole global batch that a process wants.

    Args:
      batch: The batch.
      cut: See `Cut`.
      is_marked: Whether to compute the part's `mark`: for data that every
        process reads in an order which nothing but itself determines.
      is_copied: Whether user code may fill the same arrays again while the
        part is still needed: it is read ahead, and CPU devices use a host's
        memory as it is.
    """
    rows = num_rows(batch)
    mark = checksum(batch, (0, rows - 1)) if is_marked else None
    start, stop = cut(rows)
    if (start, stop) != (0, rows):
        batch = jax.tree.map(lambda leaf: leaf[start:stop], batch)
    if is_copied:
        batch = jax.tree.map(host_arrays.owned, batch)
    return Part(data=batch, rows=rows, mark=mark)


def checksum(batch: Tree, rows: Iterable[int]) -> int:
    """A checksum of some rows of a nest of arrays."""
    mark = 0
    for leaf in jax.tree.leaves(batch):
        for row in rows:
            mark = zlib.crc32(np.ascontiguousarray(leaf[row]).tobytes(), mark)
    return mark


def rows_to_mark(rows: int) -> list[int]:
    """Rows all over a dataset, to tell by whether it is the same one."""
    count = min(rows, _NUM_MARKED)
    return [index * (rows - 1) // max(count - 1, 1) for index in range(count)]
