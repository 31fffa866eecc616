"""Datasets and loaders of torch as sources."""

import contextlib
import copy
import itertools
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Array, Batch, Dataset, Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.own_rows import LoadedSource, is_local
from keras_strategies.data.source import Cut, Part, take

_Key = tuple[int, ...]


class TorchSource(LoadedSource):
    """A source that reads a `torch.utils.data.DataLoader` or `Dataset`.

    From a map-style dataset a process reads only its own rows, with the
    loader's settings (workers, timeout, ...). All processes use the same seed
    for the samplers. Every process reads entire batches if the data is an
    `IterableDataset` or of a subclass of `DataLoader`, if `batch_size` is
    None, or if `collate_fn` is custom (it may pad a batch, or mix or drop its
    rows).

    torch's global generator is seeded for each batch, then restored. The user
    must seed other generators, also in the worker processes of a resumed run.

    Differs from torch: the shuffle order of a `RandomSampler` depends only on
    the seed and the epoch (numpy generates it). Memory is not pinned.

    Args:
      data: The data to read (see `is_torch`).
      batch_size: The batch size if `data` is a `Dataset`; default 32.
      shuffle: Whether to shuffle, if `data` is a map-style `Dataset`.
      num_processes: Number of processes that read the data.
      process_index: Index of this process among them.
      seed: The seed for shuffling if the loader has no `generator`. Must be the
        same in all processes.
      policy: AUTO and DATA divide each batch's rows; OFF makes the data
        process-local. With a `DistributedSampler`, the data is already divided,
        and the loader's batch size is per process, as in torch.

    Raises:
      ValueError: if the `DistributedSampler` is not suitable.
    """

    kind = "torch dataset"

    def __init__(
        self,
        data: Dataset,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
        policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    ) -> None:
        loader = data
        if not isinstance(data, _data().DataLoader):
            size = batch_size or 32
            loader = _data().DataLoader(data, size, shuffle)
        is_divided = False
        if num_processes > 1 and not is_local(num_processes, policy):
            is_divided = _is_divided(loader, num_processes, process_index)
        is_iterable = isinstance(loader.dataset, _data().IterableDataset)
        if type(loader) is _data().DataLoader and not is_iterable:
            batches = _IndexedBatches(loader, seed, process_index)
        else:
            batches = _IteratedBatches(loader, seed)
        super().__init__(batches, num_processes, policy, is_divided=is_divided)

    @property
    def seed(self) -> int:
        """See `Source.seed`."""
        return self._batches.seed

    def restart(self, seed: str | int | None) -> None:
        """See `Source.restart`."""
        if seed is not None:
            self._batches.seed = int(seed)


def is_torch(data: object) -> bool:
    """Returns whether an object is a torch `DataLoader` or map-style dataset.

    Another iterable dataset may yield batches, as other iterables do.
    """
    if "torch" not in sys.modules:
        return False
    is_iterable = isinstance(data, _data().IterableDataset)
    is_ours = isinstance(data, _data().DataLoader | _data().Dataset)
    return is_ours and not is_iterable


class _IndexedBatches:
    """Reads a map-style dataset at the indices that the samplers yield."""

    has_checksums = False

    def __init__(self, loader: Dataset, seed: int, process_index: int) -> None:
        self._loader = loader
        self._sampler, collate = loader.batch_sampler, loader.collate_fn
        self.is_by_rows = collate is _data().default_collate
        if self._sampler is None:
            self._sampler, self.is_by_rows = loader.sampler, False
        self._process_index = process_index
        self.seed = _find_seed(loader, seed)
        self._keys = _Keys()
        self._inner: Any = None
        self.length = self.num_rows = None
        with contextlib.suppress(TypeError, NotImplementedError):
            self.length = len(self._sampler)
            if type(self._sampler) is _data().BatchSampler:
                self.num_rows = len(self._sampler.sampler)
        self.batch_size = getattr(self._sampler, "batch_size", None)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        _set_epoch(self._loader.dataset, epoch)
        keys = self._read_keys(epoch, start)
        if not self.is_by_rows:
            options = {"has_checksums": self.has_checksums, "is_copied": True}
            for batch in self._read_items(keys, epoch, start):
                yield take(_to_arrays(batch), cut, **options)
            return
        plan, ahead = itertools.tee(_plan_reads(keys, cut))
        needed = (wanted for wanted, *_ in ahead)
        items = self._read_items(needed, epoch, start)
        for (_, count, rows, checksum), item in zip(plan, items, strict=True):
            data = _to_arrays(item)
            if not count:
                data = jax.tree.map(lambda leaf: leaf[:0], data)
            yield Part(data=data, rows=rows, checksum=checksum)

    def _read_keys(self, epoch: int, start: int) -> Iterator[Any]:
        """Returns an iterator over lists of keys, one for each batch."""
        sampler, key = self._sampler, (self.seed, epoch)
        order = None
        if type(sampler) is _data().BatchSampler:
            order = self._find_order(sampler.sampler, key)
        if order is None:
            batches = _seed_each(lambda: iter(_seed_sampler(sampler, key)), key)
            return itertools.islice(batches, start, None)
        size, end = sampler.batch_size, len(order)
        end -= end % size if sampler.drop_last else 0
        firsts = range(start * size, end, size)
        return (order[first : first + size] for first in firsts)

    def _find_order(self, sampler: Any, key: _Key) -> Any:
        """Returns the order of all rows, or None for unusual samplers."""
        shuffled = type(sampler) is _data().RandomSampler
        if not shuffled and type(sampler) is not _data().SequentialSampler:
            return None
        rows = len(sampler.data_source)
        if shuffled and (sampler.replacement or sampler.num_samples != rows):
            return None
        if shuffled:
            return np.random.default_rng(key).permutation(rows)
        return range(rows)

    def _read_items(
        self, keys: Iterator[Any], epoch: int, start: int
    ) -> Iterator[Any]:
        """Returns an iterator over collated batches of the items at `keys`."""
        user = self._loader
        # Random augmentation must differ between processes that read different
        # rows, but be the same if all processes read entire batches.
        key = (self.seed, epoch, 1 + self._process_index * self.is_by_rows)
        if self._inner is None:
            self._inner = _make_loader(user, self._keys)
        inner = self._inner

        def items() -> Iterator[Any]:
            inner.generator.manual_seed(_make_seed(key))
            self._keys.coming = map(_to_list, keys)
            return iter(inner)

        return _seed_each(items, key, start)


def _plan_reads(
    batches: Iterator[Any], cut: Cut
) -> Iterator[tuple[Any, int, int, int]]:
    """Yields (keys to read, num_own_rows, num_rows, checksum) per batch."""
    for keys in batches:
        begin, end = cut(len(keys))
        # At least one row is read: without rows, the shapes are needed.
        needed = keys[begin:end] if begin < end else keys[:1]
        checksum = zlib.crc32(f"{keys[0]} {keys[-1]}".encode())
        yield needed, end - begin, len(keys), checksum


class _IteratedBatches:
    """Reads batches by iterating over a loader."""

    length = num_rows = None
    has_checksums = is_by_rows = False

    def __init__(self, loader: Dataset, seed: int) -> None:
        self._loader = loader
        self.seed = _find_seed(loader, seed)
        self.batch_size: int | None = loader.batch_size

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        loader = self._loader
        for part in (loader.dataset, loader.sampler, loader.batch_sampler):
            _set_epoch(part, epoch)
        own = [loader.generator] if loader.generator else []
        batches = _seed_each(lambda: iter(loader), (self.seed, epoch), 0, own)
        for batch in itertools.islice(batches, start, None):
            yield take(
                _to_arrays(batch),
                cut,
                has_checksums=self.has_checksums,
                # `default_collate` creates new tensors for each batch.
                is_copied=loader.collate_fn is not _data().default_collate,
            )


class _Keys:
    """An iterable whose keys are set after it has been created."""

    coming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming


def _make_loader(user: Dataset, keys: _Keys) -> Dataset:
    """Copies a user's loader; the copy reads the items at `keys`."""
    order: dict[str, Any] = {"batch_sampler": keys}
    if user.batch_sampler is None:
        order = {"sampler": keys, "batch_size": None}
    return _data().DataLoader(
        user.dataset,
        **order,
        num_workers=user.num_workers,
        collate_fn=user.collate_fn,
        timeout=user.timeout,
        worker_init_fn=user.worker_init_fn,
        multiprocessing_context=user.multiprocessing_context,
        generator=sys.modules["torch"].Generator(),
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
    )


def _data() -> ModuleType:
    return sys.modules["torch"].utils.data


def _is_divided(loader: Dataset, count: int, process_index: int) -> bool:
    """Returns whether a loader is already sharded over the processes."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, _data().distributed.DistributedSampler):
        return False
    place = (sampler.rank, sampler.num_replicas)
    if place != (process_index, count):
        raise ValueError(
            "A `DistributedSampler` must divide the rows among the processes. "
            f"Received: rank={place[0]}, num_replicas={place[1]} in process "
            f"{process_index} of {count}. Remove it: the strategy shards rows."
        )
    repeated = sampler.total_size - len(sampler.dataset)
    if repeated > 0:
        warnings.warn(
            f"`DistributedSampler` yields {repeated} rows twice in an epoch. "
            "Remove it, because the strategy reads each row exactly once.",
            stacklevel=4,
        )
    return True


def _find_seed(loader: Dataset, seed: int) -> int:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    return seed % 2**64 if generator is None else generator.initial_seed()


def _set_epoch(target: object, epoch: int) -> None:
    # `DistributedSampler` and datasets of other libraries have `set_epoch`.
    getattr(target, "set_epoch", lambda _: None)(epoch)


def _seed_sampler(sampler: Any, key: _Key) -> Any:
    """Returns a sampler seeded equally in all processes, if possible."""
    changes = {}
    if hasattr(sampler, "generator"):
        generator = sys.modules["torch"].Generator()
        changes["generator"] = generator.manual_seed(_make_seed(key))
    if hasattr(sampler, "sampler"):
        changes["sampler"] = _seed_sampler(sampler.sampler, key)
    if changes or hasattr(sampler, "set_epoch"):
        sampler = copy.copy(sampler)
        vars(sampler).update(changes)
        _set_epoch(sampler, key[1])
    return sampler


def _to_list(keys: Any) -> Any:
    if isinstance(keys, np.ndarray):
        return keys.tolist()
    return list(keys) if isinstance(keys, range) else keys


def _make_seed(key: _Key) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def _seed_each(
    make: Callable[[], Iterator[Any]],
    key: _Key,
    first: int = 0,
    generators: Iterable[Any] = (),
) -> Iterator[Any]:
    """Yields items; seeds the generators for each item from its position."""
    used = [sys.modules["torch"].default_generator, *generators]
    items, end = None, object()
    for place in itertools.count(first):
        states = [generator.get_state() for generator in used]
        try:
            for generator in used:
                generator.manual_seed(_make_seed((*key, place)))
            items = make() if items is None else items
            item = next(items, end)
        finally:
            # Restored before `yield`, so that the caller's random numbers are
            # not affected.
            for generator, state in zip(used, states, strict=True):
                generator.set_state(state)
        if item is end:
            return
        yield item


def _to_arrays(batch: Batch) -> Tree:
    """Converts a batch to arrays, and a top-level list to a tuple for `fit`."""
    batch = jax.tree.map(_to_array, batch)
    return tuple(batch) if type(batch) is list else batch


def _to_array(leaf: Array) -> Tree:
    """Converts a tensor to an array; shares memory if it is on the host."""
    torch = sys.modules["torch"]
    if isinstance(leaf, Mapping):
        return _to_arrays(dict(leaf))
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, str) else np.asarray(leaf)
    return leaf.detach().cpu().numpy()
