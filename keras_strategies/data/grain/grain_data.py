"""Datasets and loaders of grain as sources."""

import collections
import concurrent.futures
import copy
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._core.batches import num_rows
from keras_strategies._types import Dataset, Tree
from keras_strategies.data.grain.grain_rows import (
    Stacked,
    checksum_of,
    stacked_rows,
    with_parents,
)
from keras_strategies.data.loaded import LoadedSource, check_by_rows, is_own
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.own_rows import OwnRows, stack_rows
from keras_strategies.data.source import Cut, Part, take

# Batches of a `MapDataset` that are read at once, and so read ahead.
_NUM_THREADS = 4
# Positions of an iterator that are held, for reading on from one of them.
_NUM_STATES = 64
# grain's length of what `repeat()` returns is `sys.maxsize`, before `batch`.
_ENDLESS = 2**40


class GrainSource(LoadedSource):
    """The batches of a `grain.MapDataset`, `IterDataset` or `DataLoader`.

    Of a `MapDataset` whose last transformation is `.batch(...)`, stacking
    rows, a process reads its own rows only; batches start at any position and
    epoch `e` has the order that grain gives the `e`-th repetition, so that a
    seeded `shuffle` shuffles anew. Any other one yields whole batches to every
    process, which keeps its rows: an `IterDataset`, a `DataLoader`, or
    transformations after `.batch(...)`. Their epochs are alike.

    Differs from tf: a `DataLoader` that grain's `ShardOptions` already divide
    over the processes is left as it is, and its batch size is, as everywhere
    in grain, that of one process.

    Args:
      dataset: What to read; its elements are batches.
      num_processes: Number of processes that read it.
      process_index: This process's place among them.
      seed: Not used: grain asks for seeds of its own.
      policy: AUTO and DATA divide the rows; OFF leaves what each process is
        given to it.

    Raises:
      ValueError: the elements are not batches, or the policy or the shard
        options do not fit.
    """

    kind = "grain dataset"

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
        policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    ) -> None:
        del seed
        check_by_rows(policy, "A grain dataset is")
        is_divided = False
        if num_processes > 1 and not is_own(num_processes, policy):
            is_divided = _is_divided(dataset, num_processes, process_index)
            _warn_of_slices(dataset, num_processes, process_index)
        _warn_of_lost_rows(dataset)
        is_map = _is_a(dataset, "MapDataset")
        batches = _MapBatches(dataset) if is_map else _IteratedBatches(dataset)
        super().__init__(batches, num_processes, policy, is_divided=is_divided)
        self.is_infinite = batches.is_infinite


class _MapBatches:
    """Batches of a `MapDataset`, in any order."""

    has_checksums = False

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._len = len(dataset)
        self.stacked = stacked_rows(dataset)
        self.is_by_rows = self.stacked is not None
        self._own = OwnRows()
        self._checksum = checksum_of(dataset)
        self.is_infinite = self._len >= _ENDLESS
        self.length = None if self.is_infinite else self._len
        self.batch_size = self.num_rows = None
        if self.stacked is not None:
            self.batch_size = self.stacked.batch_size
            self.num_rows = len(self.stacked.rows)
        elif self._len:
            self.batch_size = _rows_of_first(self._whole(0))

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        offset = 0 if self.length is None else epoch * self._len

        def part(index: int) -> Part:
            if self.stacked is None:
                return take(
                    self._whole(offset + index),
                    cut,
                    has_checksums=self.has_checksums,
                )
            return self._rows(self.stacked, epoch, index, cut)

        return _in_threads(part, range(start, self._len))

    def _whole(self, index: int) -> Tree:
        batch = self._dataset[index]
        if batch is None:
            raise ValueError(
                "Every index of a `grain.MapDataset` must hold a batch. "
                f"Received: None at {index}, as after `filter`. Call "
                "`.to_iter_dataset()`, which leaves such elements out."
            )
        return _arrays(batch)

    def _rows(self, stacked: Stacked, epoch: int, index: int, cut: Cut) -> Part:
        total = len(stacked.rows)
        first = index * stacked.batch_size
        rows = min(stacked.batch_size, total - first)
        first += 0 if self.length is None else epoch * total

        def read(start: int, stop: int) -> Tree:
            found = stacked.read([*range(first + start, first + stop)])
            return _arrays(stack_rows(found, "Pad them before `.batch(...)`."))

        return self._own.part(read, rows, cut, self._checksum)


class _IteratedBatches:
    """Batches that come one after the other, from an iterator with states.

    The first one is read at once, and kept for the first epoch.
    """

    length = num_rows = None
    is_by_rows = has_checksums = False
    is_infinite = False  # Whether it ends, nobody knows.

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._states: dict[int, Any] = {}
        self._begun: tuple[Any, list[Tree]] | None = None
        self.batch_size = _size_of_operations(dataset)
        if self.batch_size is None:
            iterator = iter(dataset)
            first = [_arrays(batch) for batch in itertools.islice(iterator, 1)]
            self._begun = iterator, first
            if first:
                self.batch_size = _rows_of_first(first[0])

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        del epoch
        iterator, position, waiting = self._at(start)
        try:
            for batch in itertools.chain(waiting, iterator):
                position += 1
                self._keep(position, iterator)
                if position > start:
                    yield take(
                        _arrays(batch), cut, has_checksums=self.has_checksums
                    )
        finally:
            # grain's iterators over a `DataLoader` have no `close`.
            getattr(iterator, "close", lambda: None)()

    def _at(self, start: int) -> tuple[Any, int, list[Tree]]:
        """An iterator, its position, and what was read from it already."""
        if start == 0 and self._begun is not None:
            begun, self._begun = self._begun, None
            return begun[0], 0, begun[1]
        iterator = iter(self._dataset)
        position = max((p for p in self._states if p <= start), default=0)
        if position:
            iterator.set_state(copy.deepcopy(self._states[position]))
        return iterator, position, []

    def _keep(self, position: int, iterator: Any) -> None:
        self._states.pop(position, None)
        self._states[position] = iterator.get_state()
        while len(self._states) > _NUM_STATES:
            del self._states[next(iter(self._states))]


def _size_of_operations(dataset: Dataset) -> int | None:
    """The batch size that is the last of a `DataLoader`'s operations."""
    batch = sys.modules["grain"].transforms.Batch
    for operation in list(getattr(dataset, "_operations", ()))[-1:]:
        if isinstance(operation, batch):
            return operation.batch_size
    return None


def _is_divided(
    dataset: Dataset, num_processes: int, process_index: int
) -> bool:
    """Whether a `DataLoader` reads this process's shard only."""
    if not _is_a(dataset, "DataLoader"):
        return False
    try:
        # tests/contract/test_data_contract.py
        options = dataset._shard_options
    except AttributeError:
        raise RuntimeError(
            "Whether a `grain.DataLoader` reads a shard is not known of this "
            "version of grain, and rows might be lost. Received: a loader "
            "without `_shard_options`, on several processes. Use a "
            "`grain.MapDataset`, `AutoShardPolicy.OFF` if the rows are each "
            "process's own, or another version of grain."
        ) from None
    if options.shard_count == 1:
        return False
    shard = (options.shard_index, options.shard_count)
    if shard == (process_index, num_processes):
        return True
    raise ValueError(
        "The shards of a `grain.DataLoader` must be those of the processes. "
        f"Received: shard_index={shard[0]}, shard_count={shard[1]} in process "
        f"{process_index} of {num_processes}. Leave the division to the "
        "strategy (`grain.sharding.NoSharding()`), use `ShardByJaxProcess()`, "
        "or say with `AutoShardPolicy.OFF` that the rows are the process's "
        "own."
    )


def _warn_of_slices(dataset: Dataset, count: int, process_index: int) -> None:
    """Warns of a dataset that seems to be the process's shard already."""
    for inner in with_parents(dataset):
        begin, step = (getattr(inner, n, None) for n in ("_start", "_step"))
        if (begin, step) == (process_index, count):
            warnings.warn(
                "This grain dataset seems to be divided already: it is sliced "
                f"[{begin}::{step}] in process {process_index} of "
                f"{count}. The strategy divides it once more, so that "
                "rows would be lost. Leave the slice out, or set "
                "`AutoShardPolicy.OFF`.",
                stacklevel=4,
            )
            return


def _warn_of_lost_rows(dataset: Dataset) -> None:
    """Warns of a `DataLoader` whose shards together lack rows."""
    options = getattr(dataset, "_shard_options", None)
    sampler: Any = getattr(dataset, "_sampler", None)
    if options is None or options.drop_remainder or options.shard_count == 1:
        return
    rows = len(sampler) if hasattr(sampler, "__len__") else 0
    lost = rows % options.shard_count
    if lost and rows < _ENDLESS and _loses_remainders():
        grain = sys.modules["grain"]
        warnings.warn(
            "This version of grain loses rows of a `DataLoader` that its "
            "shards cannot share evenly, also with `drop_remainder=False`. "
            f"Received: grain {grain.__version__}, {rows} rows and "
            f"{options.shard_count} shards: {lost} rows are read by no "
            "process. Leave the division to the strategy "
            "(`grain.sharding.NoSharding()`), or install a later grain.",
            stacklevel=4,
        )


@functools.cache
def _loses_remainders() -> bool:
    """Returns whether grain's loaders do so, as those of grain 0.2.18."""
    grain = sys.modules["grain"]
    options = grain.sharding.ShardOptions(shard_index=0, shard_count=2)
    sampler = grain.samplers.SequentialSampler(3, shard_options=options)
    loader = grain.DataLoader(
        data_source=range(3), sampler=sampler, shard_options=options
    )
    return len(list(loader)) < 2


def _rows_of_first(batch: Tree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if () in shapes:
        raise ValueError(
            "The elements of a grain dataset must be batches. Received: an "
            f"element with shapes {shapes}. Call `.batch(global_batch_size)`."
        )
    return num_rows(batch)


def _arrays(batch: Tree) -> Tree:
    """A nest of arrays; a list at its top is a tuple, as fit wants it."""
    # Subclasses too are left alone: grain's hold on to shared memory.
    batch = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf),
        batch,
    )
    return tuple(batch) if type(batch) is list else batch


def _in_threads(
    read: Callable[[int], Part], indices: Iterable[int]
) -> Iterator[Part]:
    """Reads some batches at once; yields them in order."""
    pool = concurrent.futures.ThreadPoolExecutor(
        _NUM_THREADS, thread_name_prefix="keras-strategies-grain"
    )
    reading: collections.deque[Any] = collections.deque()
    try:
        for index in indices:
            reading.append(pool.submit(read, index))
            if len(reading) == _NUM_THREADS:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _is_a(dataset: object, *names: str) -> bool:
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(
        dataset, tuple(getattr(grain, name) for name in names)
    )
