"""Iterables of batches as sources."""

import itertools
import sys
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from keras_strategies._types import Dataset, Tree
from keras_strategies.data.source import Cut, Part, Source, take
from keras_strategies.spmd import host_arrays


def to_arrays(batch: Tree) -> Tree:
    """Converts the leaves of a batch to NumPy arrays."""
    return jax.tree.map(np.asarray, batch)


class IterableSource(Source):
    """A source that reads any iterable of batches.

    Every process iterates over the entire iterable.

    Args:
      dataset: An iterable of batches: nests of arrays.
      is_process_local: Whether each process's iterable yields different rows.
      has_checksums: Whether processes compare checksums of their batches; see
        `take`.
    """

    kind = "an iterable"

    def __init__(
        self,
        dataset: Iterable[Tree],
        *,
        is_process_local: bool,
        has_checksums: bool,
    ) -> None:
        check_batches(dataset)
        self._dataset = dataset
        self.is_process_local = is_process_local
        self._has_checksums = has_checksums and not is_process_local
        self._peeked: list[Tree] = []

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        del epoch
        batches = host_batches(self._dataset)
        if isinstance(self._dataset, Iterator):
            batches = self._replay_peeked(batches)
        for batch in itertools.islice(batches, start, None):
            yield take(
                batch, cut, has_checksums=self._has_checksums, is_copied=True
            )

    def _replay_peeked(self, batches: Iterator[Tree]) -> Iterator[Tree]:
        """Yields all batches, including those read to find their shapes."""
        if self.is_peeked:
            for batch in batches:
                # A copy, because code may reuse its arrays for later batches.
                batch = jax.tree.map(host_arrays.copy_if_mutable, batch)
                self._peeked.append(batch)
                yield batch
            return
        peeked, self._peeked = self._peeked, []
        yield from peeked
        yield from batches


def host_batches(dataset: Dataset) -> Iterator[Tree]:
    """Returns an iterator over a dataset's batches as numpy arrays."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset):
        return dataset.as_numpy_iterator()
    if hasattr(dataset, "on_epoch_end") and hasattr(dataset, "__getitem__"):
        return _iterate_py_dataset(dataset)
    return map(to_arrays, dataset)


def _iterate_py_dataset(dataset: Dataset) -> Iterator[Tree]:
    for index in range(len(dataset)):
        yield to_arrays(dataset[index])
    dataset.on_epoch_end()


def check_batches(dataset: object) -> None:
    """Raises TypeError unless an object is an iterable of batches."""
    kinds = (np.ndarray, jax.Array, dict, tuple, list, str, bytes)
    is_read = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, kinds) or not is_read:
        raise TypeError(
            "A dataset must yield global batches. Received: an object of type "
            f"{type(dataset).__name__}. Pass a tf.data.Dataset, a PyDataset, "
            "an iterable of batches, `ks.data.files` for files, or, for "
            "arrays, `experimental_make_numpy_dataset(arrays).batch(size)`."
        )
