"""Datasets and loaders of grain as sources."""

import collections
import concurrent.futures
import functools
import itertools
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Dataset, Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.own_rows import (
    LoadedSource,
    is_local,
    stack_rows,
)
from keras_strategies.data.source import Cut, Part, take
from keras_strategies.spmd.batches import num_rows

# Number of batches of a `MapDataset` that are read concurrently in advance.
_NUM_THREADS = 4
# In grain, `repeat()` makes a dataset of `sys.maxsize` elements, and a later
# `batch` divides this number. So a dataset with at least `_UNLIMITED` elements
# counts as infinite.
_UNLIMITED = 2**40


class GrainSource(LoadedSource):
    """A source that reads a `grain.MapDataset`, `IterDataset` or `DataLoader`.

    If the last transformation of a `MapDataset` is a `.batch(...)` that stacks
    rows, each process reads only its own rows. Reading can start at any
    position. Epoch `e` has the order of grain's `e`-th repetition, so that a
    seeded `shuffle` has a different order in each epoch.

    From other data, every process reads entire batches and discards the rows of
    the other processes. This applies to an `IterDataset`, to a `DataLoader`,
    and to a `MapDataset` with transformations after `.batch(...)`. An
    `IterDataset` or `DataLoader` has the same order in all epochs.

    Differs from tf: a `DataLoader` that grain's `ShardOptions` have already
    divided among the processes is not divided again. Its batch size is per
    process, as everywhere in grain.

    Args:
      dataset: The data to read; its elements are batches.
      num_processes: Number of processes that read the data.
      process_index: Index of this process among them.
      seed: Ignored: grain's datasets have their own seeds.
      policy: AUTO and DATA divide the rows of each batch among the processes;
        OFF makes the data process-local.

    Raises:
      ValueError: if the elements are not batches, or if the shard options are
        not suitable.
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
        is_divided = False
        if num_processes > 1 and not is_local(num_processes, policy):
            is_divided = _is_divided(dataset, num_processes, process_index)
            _warn_of_slices(dataset, num_processes, process_index)
        _warn_of_lost_rows(dataset)
        is_map = isinstance(dataset, sys.modules["grain"].MapDataset)
        batches = _MapBatches(dataset) if is_map else _IteratedBatches(dataset)
        super().__init__(batches, num_processes, policy, is_divided=is_divided)
        self.is_infinite = batches.is_infinite


class _MapBatches:
    """Reads the batches of a `MapDataset` by index."""

    has_checksums = False

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._len = len(dataset)
        self.batch_size = _find_stacked_rows(dataset)
        self.is_by_rows = self.batch_size is not None
        self._checksum = _compute_checksum(dataset)
        self.is_infinite = self._len >= _UNLIMITED
        self.length = None if self.is_infinite else self._len
        self.num_rows = None
        if self.is_by_rows:
            self.num_rows = len(dataset.parents[0])
        elif self._len:
            self.batch_size = _count_rows(self._read_batch(0))

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        offset = 0 if self.length is None else epoch * self._len

        def part(index: int) -> Part:
            if self.is_by_rows:
                return self._read_rows(epoch, index, cut)
            batch = self._read_batch(offset + index)
            return take(batch, cut, has_checksums=self.has_checksums)

        return _read_in_threads(part, range(start, self._len))

    def _read_batch(self, index: int) -> Tree:
        batch = self._dataset[index]
        if batch is None:
            raise ValueError(
                "A `grain.MapDataset` must have a batch at every index. "
                f"Received: None at index {index}, such as by a `filter`. Call "
                "`.to_iter_dataset()`, which skips such elements."
            )
        return _to_arrays(batch)

    def _read_rows(self, epoch: int, index: int, cut: Cut) -> Part:
        stacked = self._dataset.parents[0]
        total, size = len(stacked), self._dataset._batch_size
        offset = index * size
        rows = min(size, total - offset)
        offset += 0 if self.length is None else epoch * total
        start, stop = cut(rows)
        # At least one row is read: without rows, the shapes are needed.
        first = min(start, rows - 1)
        indices = range(offset + first, offset + max(stop, first + 1))
        read = [stacked[i] for i in indices]
        data = stack_rows(read, "Pad the rows before `.batch(...)`.")
        data = jax.tree.map(lambda leaf: leaf[: stop - start], data)
        return Part(data=_to_arrays(data), rows=rows, checksum=self._checksum)


class _IteratedBatches:
    """Reads batches in sequence.

    If the batch size cannot be found otherwise, the first batch is read
    immediately, and stored until it is needed in the first epoch.
    """

    length = num_rows = None
    is_by_rows = has_checksums = False
    is_infinite = False  # The data may be infinite, but this is unknown.

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._first_pass: tuple[Any, list[Tree]] | None = None
        self.batch_size = _find_batch_size(dataset)
        if self.batch_size is None:
            iterator = iter(dataset)
            first = list(map(_to_arrays, itertools.islice(iterator, 1)))
            self._first_pass = iterator, first
            if first:
                self.batch_size = _count_rows(first[0])

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        del epoch
        iterator, first = self._first_pass or (iter(self._dataset), [])
        self._first_pass = None
        batches = itertools.chain(first, iterator)
        try:
            for batch in itertools.islice(batches, start, None):
                arrays = _to_arrays(batch)
                yield take(arrays, cut, has_checksums=self.has_checksums)
        finally:
            # grain's iterators over a `DataLoader` have no `close`.
            getattr(iterator, "close", lambda: None)()


def _find_batch_size(dataset: Dataset) -> int | None:
    """Finds the batch size of a `DataLoader`.

    Returns None unless its last operation forms batches.
    """
    last = [None, *getattr(dataset, "_operations", ())][-1]
    is_batch = isinstance(last, sys.modules["grain"].transforms.Batch)
    return getattr(last, "batch_size", None) if is_batch else None


def _is_divided(
    dataset: Dataset, num_processes: int, process_index: int
) -> bool:
    """Returns whether a `DataLoader` is already sharded over the processes."""
    if not isinstance(dataset, sys.modules["grain"].DataLoader):
        return False
    # tests/contract/test_data_contract.py checks that it exists.
    options = dataset._shard_options
    if options.shard_count == 1:
        return False
    shard = (options.shard_index, options.shard_count)
    if shard == (process_index, num_processes):
        return True
    raise ValueError(
        "The shards of a `grain.DataLoader` must match the processes. "
        f"Received: shard_index={shard[0]}, shard_count={shard[1]} in process "
        f"{process_index} of {num_processes}. Leave sharding to the strategy "
        "(`grain.sharding.NoSharding()`), use `ShardByJaxProcess()`, or set "
        "`AutoShardPolicy.OFF` if each process has different rows."
    )


def _warn_of_slices(dataset: Dataset, count: int, process_index: int) -> None:
    """Warns if a dataset seems to be only this process's shard.

    It would then be divided a second time.
    """
    for inner in _iterate_pipeline(dataset):
        begin, step = (getattr(inner, n, None) for n in ("_start", "_step"))
        if (begin, step) == (process_index, count):
            warnings.warn(
                "This grain dataset seems to be divided among the processes "
                f"already: it is sliced with [{begin}::{step}] in process "
                f"{process_index} of {count}. It is divided again, so rows "
                "are lost. Remove the slice, or set `AutoShardPolicy.OFF`.",
                stacklevel=4,
            )
            return


def _warn_of_lost_rows(dataset: Dataset) -> None:
    """Warns about a `DataLoader` whose shards do not cover all rows."""
    options = getattr(dataset, "_shard_options", None)
    sampler: Any = getattr(dataset, "_sampler", None)
    if options is None or options.drop_remainder or options.shard_count == 1:
        return
    rows = len(sampler) if hasattr(sampler, "__len__") else 0
    lost = rows % options.shard_count
    if lost and rows < _UNLIMITED and _loses_remainders():
        grain = sys.modules["grain"]
        warnings.warn(
            f"grain {grain.__version__} loses rows of a `DataLoader` that its "
            "shards cannot share evenly, even with `drop_remainder=False`. "
            f"Received: {rows} rows and {options.shard_count} shards, so "
            f"{lost} of the rows are lost. Leave sharding to the strategy "
            "(`grain.sharding.NoSharding()`), or install a later grain.",
            stacklevel=4,
        )


@functools.cache
def _loses_remainders() -> bool:
    """Returns whether this version of grain loses rows of uneven shards.

    grain 0.2.18 does.
    """
    grain = sys.modules["grain"]
    options = grain.sharding.ShardOptions(shard_index=0, shard_count=2)
    sampler = grain.samplers.SequentialSampler(3, shard_options=options)
    loader = grain.DataLoader(
        data_source=range(3), sampler=sampler, shard_options=options
    )
    return len(list(loader)) < 2


def _find_stacked_rows(dataset: Dataset) -> int | None:
    """Returns the batch size if a dataset ends in a `.batch(...)` of rows.

    Private attributes of grain show what a transformation does. If a version
    of grain does not have these attributes, entire batches are read.
    tests/data/grain/test_grain_data.py fails in that case.
    """
    if type(dataset).__name__ != "BatchMapDataset":
        return None
    from grain._src.python.dataset.transformations import batch

    size = getattr(dataset, "_batch_size", None)
    is_plain = getattr(dataset, "_batch_fn", None) is batch.make_batch
    return size if is_plain and isinstance(size, int) else None


def _compute_checksum(dataset: Dataset) -> int:
    """Computes a checksum of transformations: names, lengths and seeds."""
    facts = [
        (type(inner).__name__, len(inner), getattr(inner, "_seed", None))
        for inner in _iterate_pipeline(dataset)
    ]
    return zlib.crc32(repr(facts).encode())


def _iterate_pipeline(dataset: Dataset) -> Iterator[Any]:
    """Yields a dataset and, recursively, the datasets and sources it reads."""
    waiting = [dataset]
    for inner in waiting:
        yield inner
        waiting.extend(getattr(inner, "parents", ()))


def _count_rows(batch: Tree) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if () in shapes:
        raise ValueError(
            "The elements of a grain dataset must be batches. Received: an "
            f"element with shapes {shapes}. Call `.batch(global_batch_size)`."
        )
    return num_rows(batch)


def _to_arrays(batch: Tree) -> Tree:
    """Converts a batch to arrays, and a top-level list to a tuple for `fit`."""
    # Subclasses of `np.ndarray` are not converted: grain's subclass keeps alive
    # the shared memory that contains its values.
    batch = jax.tree.map(np.asanyarray, batch)
    return tuple(batch) if type(batch) is list else batch


def _read_in_threads(
    read: Callable[[int], Part], indices: Iterable[int]
) -> Iterator[Part]:
    """Reads several batches concurrently; yields them in order of `indices`."""
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
