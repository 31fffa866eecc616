"""Reading the rows of array files, and of files with a user's reader."""

import contextlib
import itertools
import operator
import zipfile
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from numpy.lib import format as npy

from keras_strategies._types import Tree
from keras_strategies.data.batch_spec import find_row_kind
from keras_strategies.data.own_rows import stack_rows
from keras_strategies.data.prefetch import Rebatcher, slice_rows
from keras_strategies.data.source import Part
from keras_strategies.data.sources.files import ARRAYS, Files, let_go
from keras_strategies.spmd.batches import num_rows


def count_rows(data: Files) -> dict[str, int]:
    """Returns the number of rows in each array file, read from its header.

    Returns an empty dict for files of a user's reader.
    """
    counts = {}
    for path in data.paths if data.reader in ARRAYS else ():
        with _explain_errors(path):
            counts[path] = _read_shape(data, path)[0]
    return counts


def _read_shape(data: Files, path: str) -> tuple[int, ...]:
    """Returns the shape of a file's first array."""
    if data.reader == "npy":
        return np.load(path, mmap_mode="r").shape
    keys = [data.keys] if isinstance(data.keys, str) else data.keys
    with zipfile.ZipFile(path) as archive:
        name = f"{keys[0]}.npy" if keys else archive.namelist()[0]
        with archive.open(name) as member:
            read = npy.read_array_header_2_0
            if npy.read_magic(member) == (1, 0):
                read = npy.read_array_header_1_0
            return read(member)[0]


def read_files(
    data: Files, paths: Iterable[str], counts: dict[str, int], skip: int
) -> Iterator[Part]:
    """Yields the rows of files in pieces, in order.

    Args:
      data: The description of all files.
      paths: The files to read.
      counts: The number of rows in each file, if it is known.
      skip: Number of rows to skip at the beginning.

    Raises:
      OSError: if a file cannot be read.
      ValueError: if the rows of two pieces differ in structure or shape.
    """
    kind = None
    for path in paths:
        if path in counts and counts[path] <= skip:
            skip -= counts[path]
            continue
        for piece in _read_pieces(data, path):
            rows = num_rows(piece)
            if skip < rows:
                new_kind = find_row_kind(piece)
                if kind not in (None, new_kind):
                    raise ValueError(
                        "The rows of all files must have the same structure, "
                        f"shapes and dtypes. Received: {kind} and {new_kind}, "
                        f"from {path}. Pad the rows in the reader, or use "
                        "`keys` to select arrays that are in all files."
                    )
                kind = new_kind
                left = slice_rows(piece, skip, None)
                yield Part(data=left, rows=rows - skip)
            skip = max(skip - rows, 0)


def _read_pieces(data: Files, path: str) -> Iterator[Tree]:
    """Yields the rows of a file as nests of arrays of shape (rows, ...)."""
    size = data.batch_size
    with _explain_errors(path):
        if callable(data.reader):
            rows = iter(data.reader(path))
            while piece := list(itertools.islice(rows, size)):
                yield stack_rows(piece, "Pad the rows in the reader.")
            return
        arrays = _load_arrays(data, path)
        for first in range(0, num_rows(arrays), size):
            yield slice_rows(arrays, first, first + size)
            jax.tree.map(let_go, arrays)


def _load_arrays(data: Files, path: str) -> Tree:
    if data.reader == "npy":
        return np.load(path, mmap_mode="r")
    with np.load(path) as loaded:
        if isinstance(data.keys, str):
            return loaded[data.keys]
        if data.keys is not None:
            return tuple(loaded[key] for key in data.keys)
        return dict(loaded)


def shuffle_windows(
    data: Files,
    paths: Iterable[str],
    counts: dict[str, int],
    start: int,
    key: tuple[int, ...],
) -> Iterator[Part]:
    """Yields the rows of files, shuffled within windows.

    Args:
      data: The description of all files.
      paths: The files to read.
      counts: The number of rows in each file, if it is known.
      start: Number of rows to skip at the beginning.
      key: The seed for shuffling, as integers.
    """
    # Each window has a separate shuffle order. So resuming skips all windows
    # before `start` without shuffling them, and then the first rows of the
    # window that contains `start`.
    number, skip = divmod(start, data.window)
    rows = Rebatcher(read_files(data, paths, counts, number * data.window))
    while (window := rows.take(data.window)) is not None:
        generator = np.random.default_rng((*key, number))
        order = generator.permutation(num_rows(window))[skip:]
        if len(order):
            shuffled = jax.tree.map(operator.itemgetter(order), window)
            yield Part(data=shuffled, rows=len(order))
        number, skip = number + 1, 0


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OSError(
            f"A file could not be read. Received: {path}: "
            f"{type(error).__name__}: {error}. Write the file again, or remove "
            "it from the dataset."
        ) from error
