"""Sources yield batches of rows; each process reads its share of them."""

import abc
import dataclasses
import enum
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.shuffled_orders import Order
from keras_strategies.spmd import host_arrays
from keras_strategies.spmd.batches import num_rows


class Reading(enum.Enum):
    """The way in which each process reads data.

    Attributes:
      ROWS: The process reads only its own rows.
      PIPELINE: The process reads all rows and discards the rows of the other
        processes.
      LOCAL: The process reads rows that no other process reads.
      REPLICAS: The process reads an entire batch for each of its replicas.
    """

    ROWS = "each process reads only its own rows of each batch"
    PIPELINE = "each process runs the entire pipeline and uses only its rows"
    LOCAL = "each process reads only its own files, shard or dataset"
    REPLICAS = "each replica gets entire batches from its process's dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """A source's description of how it is read, made without reading data.

    Attributes:
      applied: The policy by which the data is divided among processes.
      reason: The reason for `applied`, as the end of a sentence: "because ...".
      reading: How each process reads the data.
      num_rows: Number of rows in an epoch of `num_batches` batches, if known.
      files: The files of each process, if these are the same in each epoch.
    """

    applied: AutoShardPolicy
    reason: str
    reading: Reading = Reading.PIPELINE
    num_rows: int | None = None
    files: tuple[tuple[str, ...], ...] = ()


_NUM_MARKED = 16
Cut = Callable[[int], tuple[int, int]]
"""A function that selects this process's rows of a global batch.

It is called with the number of rows in the global batch, and returns `(start,
stop)`: this process needs the rows from `start` up to, but not including,
`stop`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process's rows of a batch.

    Attributes:
      data: A nest of arrays with this process's rows, in the order of the
        batch; each array has the shape (number of rows, ...). If the process
        has no rows in this batch, the arrays are empty, but their dtypes and
        other dimensions are still those of the other processes' rows.
      rows: Number of rows in the global batch. For a process-local source,
        number of rows in `data`.
      checksum: A checksum of the first and the last row of the global batch,
        by which processes check that they read the same batch; None if it was
        not computed.
      counts: Only for a process-local source: the number of rows for each
        replica of this process. If None, the rows are divided automatically.

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
    """A counter of the epochs that have been read from a dataset.

    Attributes:
      next: Number of the epoch that the next call of `fit`, `evaluate` or
        `predict`, or the next iterator, begins with.
    """

    def __init__(self) -> None:
        self.next = 0

    def reach(self, epoch: int) -> None:
        """Records that all epochs before `epoch` have been begun."""
        self.next = max(self.next, epoch)


class Source(abc.ABC):
    """A source of global batches, which every process of a job reads.

    A source can be passed to `fit` (also as validation data), `evaluate`,
    `predict`, `experimental_distribute_dataset` and `explain_input`, and be
    returned by an Estimator's `input_fn`. A subclass implements `read`, and
    sets the attributes whose values it knows; docs/extending.md has an example.
    Each process must create the source with the same arguments.

    A *global* source can read any row in any process, and yields the rows that
    `cut` selects. A *process-local* source yields rows that no other process
    reads, for example from its own files or its own shard of a database.

    Resuming relies on one promise: for the same `epoch` and `start`, `read`
    yields the same rows, in any process and for any number of processes.

    Attributes:
      kind: A name for the data in messages, such as "numpy arrays".
      is_process_local: Whether the source is process-local.
      is_planned: Whether all lengths are known and reading cannot fail. If so,
        the processes need not tell each other at every step what they have
        read.
      batch_size: Number of rows in a full global batch, if known. A
        process-local source may yield batches of any size. Their rows are
        regrouped into this process's share of `batch_size`; if that is unknown,
        the size of the first batch determines the share.
      likely_size: Number of rows in a full global batch, assuming that
        functions mapped over batches do not change this number.
      num_batches: Number of global batches in an epoch, if known.
      order: The shuffle orders of the epochs, if the source shuffles its rows
        or batches itself; else None.
      is_infinite: Whether the source certainly never ends, so that `fit`
        requires `steps_per_epoch`.
      has_own_seeds: Whether an epoch has the order of the dataset's iterator
        with the epoch's number, which seeds in the dataset determine.
      is_peeked: Whether data is currently read only to find its shapes. A
        source that can be read only once then yields the same data again to the
        next reader.

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
    has_own_seeds: bool = False
    is_peeked: bool = False

    @functools.cached_property
    def passes(self) -> Passes:
        """The counter of epochs read so far; other sources may share it."""
        return Passes()

    def facts(self) -> dict[str, Any]:
        """Returns properties of the data that must be equal in all processes.

        The processes compare them before they read the data.
        """
        return {
            "data": self.kind,
            "own rows": self.is_process_local,
            "batch_size": self.batch_size,
            "num_batches": None if self.is_process_local else self.num_batches,
        }

    def summary(self) -> Summary:
        """Returns the summary that `Strategy.explain_input` shows.

        Does not read the data.
        """
        if self.is_process_local:
            return Summary(
                applied=AutoShardPolicy.OFF,
                reason="each process has process-local rows",
                reading=Reading.LOCAL,
            )
        return Summary(
            applied=AutoShardPolicy.DATA, reason="it is not split by files"
        )

    @property
    def checksum(self) -> int | None:
        """A checksum of some rows, by which processes compare their data.

        None if each `Part` has a checksum, or if no checksums are needed.
        """
        return None

    @property
    def seed(self) -> str | int | None:
        """The seed for shuffling; None if the source has no seed."""
        return None if self.order is None else self.order.seed

    def restart(self, seed: str | int | None) -> None:
        """Switches to the shuffle orders of another source of the same data.

        Must be called before anything is read.

        Args:
          seed: The value of `seed` of the other source.

        Raises:
          ValueError: if `seed` comes from another kind of data.
        """
        if self.order is not None and seed is not None:
            self.order.restart(str(seed))

    @abc.abstractmethod
    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """Reads an epoch. Called in every process, usually in a thread.

        Args:
          epoch: Number of the pass over the data, from 0. Together with the
            source's seed it determines the order of the rows.
          start: Number of batches to skip at the beginning: global batches, or
            this process's own batches if the source is process-local.
          cut: A function that selects the rows of a global batch that this
            process needs, `cut(rows) -> (start, stop)`. A process-local source
            ignores it.

        Yields:
          A `Part` for each batch, in order and without padding. The last batch
          may have fewer rows. `take` makes a `Part` from an entire batch.
        """

    def begin_epoch(self, epoch: int, start: int) -> None:
        """Prepares an epoch. Called before `read`, with the same arguments.

        `fit`, `evaluate`, `predict` and the iterators of distributed datasets
        call this method. A model always calls `end_epoch` before it calls this
        method again.
        """
        del epoch, start

    def end_epoch(self) -> None:
        """Cleans up after an epoch, even if it was not read to the end."""
        return

    def __iter__(self) -> Iterator[Tree]:
        """Returns an iterator over the global batches of the first epoch."""
        return (part.data for part in self.read(0, 0, all_rows))


def all_rows(rows: int) -> tuple[int, int]:
    """Selects all rows; to be passed as a `Cut`."""
    return 0, rows


def take(
    batch: Tree,
    cut: Cut,
    *,
    has_checksums: bool = False,
    is_copied: bool = False,
) -> Part:
    """Selects this process's rows from an entire global batch.

    Args:
      batch: The global batch.
      cut: The function that was passed to `Source.read`.
      has_checksums: Whether to compute `Part.checksum`. Set it for data whose
        order this library does not determine: if a process reads different
        batches than the other processes, an error is raised.
      is_copied: Whether to copy the rows, unless their arrays are immutable.
        This is necessary if the code that yields the batches reuses its arrays
        for later batches: parts are read ahead of time, and CPU devices use the
        host's memory without a copy.

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
    """Returns `part` unchanged if a source has yielded a `Part`.

    Raises:
      TypeError: if `part` is not a `Part`.
    """
    if not isinstance(part, Part):
        raise TypeError(
            "A source must yield `ks.data.Part` objects. Received: an object "
            f"of type {type(part).__name__} from {kind}. Yield "
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
    """Computes a checksum of all elements in a nest of arrays."""
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        data = np.ascontiguousarray(leaf).reshape(-1)
        checksum = zlib.crc32(data.view(np.uint8).data, checksum)
    return checksum


def rows_to_checksum(rows: int) -> list[int]:
    """Returns indices of rows spread evenly over a dataset, for a checksum."""
    count = min(rows, _NUM_MARKED)
    return [index * (rows - 1) // max(count - 1, 1) for index in range(count)]
