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
needs: the first one, and one past the last one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a batch that one process read.

    Attributes:
      data: A nest of arrays of shapes (rows of this process, ...): its rows,
        in order. Without rows it still has the dtypes and other dimensions of
        the other processes' rows.
      rows: Number of rows of the global batch; for a process-local source,
        of `data`.
      checksum: A checksum of the first and the last row of the global batch,
        to compare processes by; None if it was not computed.
      counts: For a process-local source: how many of the rows each replica of
        this process takes; None leaves that to the feed.

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
    """A counter of the passes over a dataset, shared by all loops.

    Attributes:
      next: Number of the epoch that the next loop begins with.
    """

    def __init__(self) -> None:
        self.next = 0

    def reach(self, epoch: int) -> None:
        """Records that loops have begun all epochs before `epoch`."""
        self.next = max(self.next, epoch)


class Source(abc.ABC):
    """A source of global batches, which every process of a job reads.

    `fit`, `evaluate`, `predict`, their validation data,
    `experimental_distribute_dataset`, `explain_input` and an Estimator's
    `input_fn` accept one. A subclass implements `read`, and sets those
    attributes that it knows; docs/extending.md has an example. Each process
    makes one from the same arguments.

    A *global* source can read any row in any process, and yields those that
    `cut` selects. A *process-local* one yields rows that no other process reads
    (its files, its shard of a database).

    Resuming relies on one promise: for the same `epoch` and `start`, `read`
    yields the same rows, in any process and for any number of processes.

    Attributes:
      kind: The name of the data, for messages: "numpy arrays".
      is_process_local: Whether no other process reads these rows.
      is_planned: Whether all lengths are known and reading cannot fail. Then
        processes do not exchange what they have read.
      batch_size: Number of rows of a full global batch, if known. A
        process-local source yields batches of any size: the feed regroups their
        rows to this process's share of `batch_size`, or, if that is unknown, of
        the first batch's rows.
      likely_size: Number of rows of a full global batch if functions that are
        mapped over batches keep their number of rows.
      num_batches: Number of global batches in an epoch, if known.
      order: The orders in which it shuffles its epochs, if it shuffles itself.
      is_infinite: Whether it certainly never ends: `fit` needs a number of
        steps.
      is_peeked: Whether the present read only shows shapes. A source that can
        be read only once yields the same data again to the next reader.

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
        """The counter of passes over the dataset; loops may share one."""
        return Passes()

    def facts(self) -> dict[str, Any]:
        """Returns facts that must be equal in all processes."""
        return {
            "data": self.kind,
            "own rows": self.is_process_local,
            "batch_size": self.batch_size,
            "num_batches": None if self.is_process_local else self.num_batches,
        }

    def summary(self) -> Summary:
        """Returns what `Strategy.explain_input` shows; reads nothing."""
        if self.is_process_local:
            return Summary(
                applied=AutoShardPolicy.OFF,
                reason="each process has process-local rows",
            )
        return Summary(
            applied=AutoShardPolicy.DATA, reason="it is not split by files"
        )

    @property
    def checksum(self) -> int | None:
        """A checksum of some rows, equal in processes that read the same data.

        None if the parts have checksums, or need none.
        """
        return None

    @property
    def seed(self) -> str | int | None:
        """The seed of the epochs' orders; None if the source has none."""
        return None if self.order is None else self.order.seed

    def restart(self, seed: str | int | None) -> None:
        """Switches to the orders of another source, before anything is read.

        Args:
          seed: The value that `seed` of another source of the same data had.

        Raises:
          ValueError: if `seed` is of another kind of data.
        """
        if self.order is not None and seed is not None:
            self.order.restart(str(seed))

    @abc.abstractmethod
    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """Reads an epoch. Called in every process, mostly from a thread.

        Args:
          epoch: Number of the pass over the data, from 0. Together with the
            source's seed it determines the order of the rows.
          start: Number of global batches (of a process-local source: of its
            batches) to skip at the beginning.
          cut: The rows of a global batch that this process needs (`Cut`); a
            process-local source ignores it.

        Yields:
          A `Part` for each batch, in order, not padded; the last one may be
          shorter. `take` makes one from an entire batch.
        """

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Prepares an epoch; called before it is read, with `read`'s arguments.

        Only loops of models call it, and never twice without `end_epoch`.
        """
        del epoch, start

    def end_epoch(self) -> None:
        """Cleans up after an epoch, even if it was not read to its end."""
        return

    def __iter__(self) -> Iterator[Tree]:
        """Returns an iterator over the global batches of the first epoch."""
        return (part.data for part in self.read(0, 0, all_rows))


def all_rows(rows: int) -> tuple[int, int]:
    """Selects every row; a `Cut`."""
    return 0, rows


def take(
    batch: Tree,
    cut: Cut,
    *,
    has_checksums: bool = False,
    is_copied: bool = False,
) -> Part:
    """Returns this process's rows of an entire global batch.

    Args:
      batch: The batch.
      cut: See `Cut`.
      has_checksums: Whether to compute the part's `checksum`: for data that
        every process reads in an order that only the data itself determines.
      is_copied: Whether user code may refill the same arrays while the part is
        still needed. Parts are read ahead, and CPU devices use host memory
        without a copy.

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


def check_part(part: object, kind: str) -> Part:
    """Returns a part that a source has yielded, after checking its type.

    Raises:
      TypeError: if it is not a `Part`.
    """
    if not isinstance(part, Part):
        raise TypeError(
            "A source must yield parts of batches. Received: an object of type "
            f"{type(part).__name__} from {kind}. Yield "
            "`ks.data.take(batch, cut)`, or a `ks.data.Part`."
        )
    return part


def rows_checksum(batch: Tree, rows: Iterable[int]) -> int:
    """Computes a checksum of some rows of a nest of arrays."""
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        for row in rows:
            checksum = zlib.crc32(
                np.ascontiguousarray(leaf[row]).tobytes(), checksum
            )
    return checksum


def data_checksum(batch: Tree) -> int:
    """Computes a checksum of all entries of a nest of arrays."""
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        data = np.ascontiguousarray(leaf).reshape(-1)
        checksum = zlib.crc32(data.view(np.uint8).data, checksum)
    return checksum


def rows_to_checksum(rows: int) -> list[int]:
    """Returns rows spread evenly over a dataset, for a checksum."""
    count = min(rows, _NUM_MARKED)
    return [index * (rows - 1) // max(count - 1, 1) for index in range(count)]
