"""Descriptions of datasets in files, and memory-mapped arrays."""

import dataclasses
import glob
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from keras_strategies._types import Tree
from keras_strategies.cluster.checks import check_number

Reader = str | Callable[[str], Iterable[Tree]]

ARRAYS = ("npz", "npy")
_WINDOW = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """A description of files and of how to read rows from them.

    The function `files` creates this object. Its attributes that are not listed
    below are arguments of that function.

    Attributes:
      paths: The files, in order.
      window: Number of consecutive rows that are shuffled together; 0 for no
        shuffling.

    Example:
      >>> files = ks.data.files("train/*.npz", "npz", batch_size=64)
      >>> isinstance(files, ks.data.Files), len(files.paths)
      (True, 2)
    """

    paths: tuple[str, ...]
    reader: Reader
    batch_size: int
    keys: str | tuple[str, ...] | None = None
    window: int = 0
    seed: int | None = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        fix = "Pass a number of rows."
        size = self.batch_size
        check_number("`batch_size`", size, fix, minimum=1, is_optional=False)
        check_number("`shuffle`", self.window, fix, minimum=0)
        if not callable(self.reader) and self.reader not in ARRAYS:
            raise ValueError(
                "`reader` must be 'npz', 'npy' or a function of a path. "
                f"Received: {self.reader!r}. For other formats, pass a "
                "function of a path that yields rows, or a `tf.data.Dataset`."
            )


def files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    reader: Reader,
    *,
    batch_size: int,
    keys: str | Sequence[str] | None = None,
    shuffle: bool | int = False,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Files:
    """Describes a dataset stored in files, for `fit` and distributed datasets.

    The rows of all files form one sequence: the files in sorted order, and the
    rows of each file in order. If there are several processes and at least as
    many files, each process reads entire files (`AutoShardPolicy.AUTO` and
    `FILE`). Otherwise (`DATA`) each process reads all files and uses its own
    rows of every batch of the sequence.

    Args:
      pattern: A path, a glob ("**" matches any directories), or several paths.
      reader: The format of the files. "npz": arrays of equal length, where each
        batch is a dict of arrays (or see `keys`). "npy": one array, which is
        memory-mapped. For other formats, pass a function that is called with a
        path and yields rows: nests of arrays with the same structure and shapes
        in all rows. It must yield them in the same order in every call, and
        each row in new arrays.
      batch_size: Number of rows in a global batch.
      keys: The names of the arrays in "npz" files that form a batch. With
        several names, a batch is a tuple of these arrays; with one name (a
        str), it is the array itself.
      shuffle: Whether to shuffle the files in each epoch, and to shuffle the
        rows within windows of 10000 consecutive rows. An int sets another
        window size. All rows of a window are in memory at the same time.
      seed: The seed for shuffling. The order of the rows depends only on the
        seed and the epoch.
      drop_remainder: Whether to drop the last batch if it has fewer rows. If
        each process reads entire files, each of them drops its own last,
        smaller batch.

    Raises:
      ValueError: if no file was found, or if arguments are invalid or cannot be
        combined.
      FileNotFoundError: if a path does not exist.

    Example:
      ```python
      train = ks.data.files(
          "train/*.npz", "npz", keys=("x", "y"), batch_size=256, shuffle=True
      )
      model.fit(train, epochs=3)
      ```
    """
    return Files(
        paths=_find_files(pattern),
        reader=reader,
        batch_size=batch_size,
        keys=keys if isinstance(keys, str | None) else tuple(keys),
        window=_WINDOW if shuffle is True else int(shuffle),
        seed=seed,
        drop_remainder=drop_remainder,
    )


def _find_files(pattern: Any) -> tuple[str, ...]:
    """Returns the files that match a pattern, sorted in all processes."""
    is_one = isinstance(pattern, str | os.PathLike)
    paths = [os.fspath(path) for path in ([pattern] if is_one else pattern)]
    if is_one and not os.path.lexists(pattern):
        matches = glob.glob(paths[0], recursive=True)
        paths = [path for path in matches if os.path.isfile(path)]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise FileNotFoundError(
            f"Every path must be an existing file. Received: {missing[0]}. "
            "Pass files, or a glob such as 'directory/*.npz'."
        )
    if not paths:
        raise ValueError(
            "A dataset of files needs at least one file. Received: "
            f"{pattern!r}, which matches no file in {os.getcwd()}. Check the "
            "pattern; it is relative to that directory."
        )
    return tuple(sorted(paths))


def is_mapped(array: object) -> bool:
    """Returns whether an array is a shared `np.memmap`, or a view of one.

    Returns False for copy-on-write arrays (mode "c"), which do not share memory
    with their file.
    """
    return _find_memory(array) is not None


def let_go(array: object) -> None:
    """Allows the system to free the memory of a memory-mapped array.

    Otherwise the pages that were read from the file count as the process's
    memory for as long as the array exists. No data is lost: values written to
    the array are in the file. Does nothing for other arrays.
    """
    memory = _find_memory(array)
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def _find_memory(array: object) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # Values that were written to a copy-on-write array are not in the
            # file, so the array's pages must stay in memory.
            memory = getattr(array, "_mmap", None)
            return None if array.mode == "c" else memory
        array = array.base
    return None
