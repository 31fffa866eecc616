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
from keras_strategies._types import Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.shuffled_orders import Order
from keras_strategies.data.source_summary import Summary

_NUM_MARKED = 16
Cut = Callable[[int], tuple[int, int]]
"""A function from a global batch's number of rows to the rows that this process
wants: the first one, and one past the last one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one process read of a batch.

    Attributes:
      data: A nest of arrays of shapes (rows of this process, ...): its rows,
        in their order; maybe none, but with the dtypes and other dimensions
        that the rows of the others have.
      rows: Number of rows of the batch, those of all processes together; of a
        process-local source those of `data`.
      checksum: A checksum of the first and the last row of the whole batch, if
        it was computed, to find whether all processes see the same.
      counts: For a process-local source: how many of the rows each of this
        process's replicas takes, if that is not left to the feed.

    Example:
      ```python
      import numpy as np

      rows = {"x": np.zeros((32, 8), "float32")}
      part = ks.data.Part(data=rows, rows=64)
      ```
    """

    data: Tree
    rows: int
    checksum: int | None = None
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
    """A source of global batches, which every process of a job reads.

    `fit`, `evaluate`, `predict`, their validation data,
    `experimental_distribute_dataset`, `explain_input` and an Estimator's
    `input_fn` take one. A subclass has a method `read`, and sets of the
    attributes what it knows; docs/extending.md has an example. Each process
    makes a source of its own from the same arguments.

    A *global* source could give any row to any process, and gives those that
    `cut` asks for. A *process-local* one gives rows that no other process reads
    (its files, its shard of a database).

    Resuming rests on one promise: for the same `epoch` and `start`, `read`
    yields the same rows, in any process and on any number of them.

    Attributes:
      kind: What it reads, for messages: "numpy arrays".
      is_process_local: Whether no other process reads these rows.
      is_planned: Whether all lengths are known and reading cannot fail: then
        processes do not send each other what they have read.
      batch_size: Rows of a whole global batch, if known. A process-local
        source yields batches of any size: the feed regroups their rows to this
        process's share of `batch_size`, or, where that is unknown, of the
        first batch's rows.
      likely_size: Rows of a whole global batch if functions that are mapped
        over batches keep their number.
      num_batches: Number of global batches in an epoch, if known.
      order: The orders in which it shuffles its epochs, if it does so itself.
      is_infinite: Whether it surely never ends: `fit` needs a number of steps.
      is_peeked: Whether what is read now only shows shapes. Data that can be
        read only once give it again to the next reader.

    Example:
      ```python
      import numpy as np


      class Squares(ks.data.Source):
          batch_size, num_batches = 8, 4

          def read(self, epoch, start, cut):
              for index in range(start, self.num_batches):
                  x = np.full((8, 32), index / 4)
                  yield ks.data.take((x, x[:, :1] ** 2), cut)


      model.fit(Squares())
      ```
    """

    kind: ClassVar[str] = "data"
    is_process_local: bool = False
    is_planned: bool = False
    batch_size: int | None = None
    likely_size: int | None = None
    num_batches: int | None = None
    order: Order | None = None
    is_infinite: bool = False
    is_peeked: bool = False

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes over its dataset; its own, if it is not given others."""
        return Passes()

    def facts(self) -> dict[str, Any]:
        """What the sources of all processes must have alike."""
        return {
            "data": self.kind,
            "own rows": self.is_process_local,
            "batch_size": self.batch_size,
            "num_batches": None if self.is_process_local else self.num_batches,
        }

    def summary(self) -> Summary:
        """What `Strategy.explain_input` shows of it; reads nothing."""
        if self.is_process_local:
            return Summary(
                applied=AutoShardPolicy.OFF,
                reason="each process has rows of its own",
            )
        return Summary(
            applied=AutoShardPolicy.DATA, reason="it is not split by files"
        )

    @property
    def checksum(self) -> int | None:
        """A checksum of some rows: the same where the same was given.

        None if the parts have checksums, or need none.
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
        """Reads an epoch. Called in every process, mostly from a thread.

        Args:
          epoch: Number of the pass over the data, from 0; with the source's
            seed it determines the order of the rows.
          start: Number of global batches (for a process-local source: of its
            own batches) to leave out at the beginning.
          cut: Which rows of a global batch this process wants (`Cut`); a
            process-local source ignores it.

        Yields:
          A `Part` for each batch, in their order, not padded; the last one may
          be shorter. `take` makes one of a whole batch.
        """

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Called before an epoch is read; the arguments are those of `read`.

        By loops of models alone, and never twice without `end_epoch`.
        """
        del epoch, start

    def end_epoch(self) -> None:
        """Called after an epoch, whether it was read to its end or not."""
        return

    def __iter__(self) -> Iterator[Tree]:
        """The global batches of the first epoch."""
        return (part.data for part in self.read(0, 0, all_rows))


def all_rows(rows: int) -> tuple[int, int]:
    """A `Cut` that wants every row."""
    return 0, rows


def take(
    batch: Tree,
    cut: Cut,
    *,
    has_checksums: bool = False,
    is_copied: bool = False,
) -> Part:
    """The rows of a whole global batch that a process wants.

    Args:
      batch: The batch.
      cut: See `Cut`.
      has_checksums: Whether to compute the part's `checksum`: for data that
        every process reads in an order which nothing but itself determines.
      is_copied: Whether user code may fill the same arrays again while the
        part is still needed: it is read ahead, and CPU devices use a host's
        memory as it is.

    Example:
      >>> import numpy as np
      >>> part = ks.data.take(np.arange(6), lambda rows: (rows // 2, rows))
      >>> part.data, part.rows
      (array([3, 4, 5]), 6)
    """
    rows = num_rows(batch)
    checksum = rows_checksum(batch, (0, rows - 1)) if has_checksums else None
    start, stop = cut(rows)
    if (start, stop) != (0, rows):
        batch = jax.tree.map(lambda leaf: leaf[start:stop], batch)
    if is_copied:
        batch = jax.tree.map(host_arrays.copy_if_mutable, batch)
    return Part(data=batch, rows=rows, checksum=checksum)


def checked_part(part: object, kind: str) -> Part:
    """What a source has yielded.

    Raises:
      TypeError: it is no `Part`.
    """
    if not isinstance(part, Part):
        raise TypeError(
            "A source yields parts of batches. Received: an object of type "
            f"{type(part).__name__} from {kind}. Yield "
            "`ks.data.take(batch, cut)`, or a `ks.data.Part`."
        )
    return part


def rows_checksum(batch: Tree, rows: Iterable[int]) -> int:
    """A checksum of some rows of a nest of arrays."""
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        for row in rows:
            checksum = zlib.crc32(
                np.ascontiguousarray(leaf[row]).tobytes(), checksum
            )
    return checksum


def data_checksum(batch: Tree) -> int:
    """A checksum of all entries of a nest of arrays, in their order."""
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        data = np.ascontiguousarray(leaf).reshape(-1)
        checksum = zlib.crc32(data.view(np.uint8).data, checksum)
    return checksum


def rows_to_checksum(rows: int) -> list[int]:
    """Rows all over a dataset, by which it is compared with another."""
    count = min(rows, _NUM_MARKED)
    return [index * (rows - 1) // max(count - 1, 1) for index in range(count)]
