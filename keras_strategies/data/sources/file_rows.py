"""Reading the rows of array files, text files and record files."""

import contextlib
import functools
import itertools
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from numpy.lib import format as npy

from keras_strategies._types import Tree
from keras_strategies.data.own_rows import stack_rows
from keras_strategies.data.sources.files import Files, let_go
from keras_strategies.gpu.topology_devices import hide_gpus

_MAX_OPEN = 64
# Bytes around a record in a TFRecord file: its length and two checksums.
_TFRECORD_FRAME = 16


class ArrayRows:
    """The rows of "npz" and "npy" files.

    The methods refer to rows by *items*. Here, an item is the row's index among
    the rows of all `paths`.

    Args:
      data: The description of all files.
      paths: The files, in the order in which they are read.
      counts: The number of rows in each file.
    """

    def __init__(
        self, data: Files, paths: Sequence[str], counts: dict[str, int]
    ) -> None:
        self._paths = paths
        self._ends = np.cumsum([0, *(counts[path] for path in paths)])
        self._names = ",".join(map(os.path.basename, paths))
        self._read_batch = functools.lru_cache(_MAX_OPEN)(
            functools.partial(_read_batch, data)
        )

    def items(self, skip: int) -> Iterator[int]:
        """Returns an iterator over the items after the first `skip`."""
        return iter(range(skip, int(self._ends[-1])))

    def label(self, item: int) -> str:
        """Returns text that identifies an item and its files, for checksums."""
        return f"{self._names} {item}"

    def read(self, items: Sequence[int]) -> Tree:
        """Reads the given items into new arrays of shape (rows, ...)."""
        positions = np.asarray(items)
        numbers = np.searchsorted(self._ends, positions, side="right") - 1
        nest, leaves = None, []
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            rows = _to_slice(positions[at] - self._ends[number])
            batch = self._read_batch(self._paths[number])
            arrays, nest = jax.tree.flatten(batch)
            leaves = leaves or [
                np.empty((len(items), *a.shape[1:]), a.dtype.newbyteorder("="))
                for a in arrays
            ]
            for leaf, array in zip(leaves, arrays, strict=True):
                leaf[_to_slice(at)] = array[rows]
                let_go(array)
        return jax.tree.unflatten(nest, leaves)


class _Record(NamedTuple):
    path: str
    index: int
    value: Any


class RecordRows:
    """The rows of files that can only be read from beginning to end.

    These are text files, TFRecord files and the files of a user's reader. The
    methods refer to rows by *items*. Here, an item is a record that has not
    been parsed yet.

    Args:
      data: The description of all files.
      paths: The files, in the order in which they are read.
      counts: The number of rows in each file whose number of rows is known.
    """

    def __init__(
        self, data: Files, paths: Sequence[str], counts: dict[str, int]
    ) -> None:
        self._data, self._paths, self._counts = data, paths, counts

    def items(self, skip: int) -> Iterator[_Record]:
        """Iterates over the items after the first `skip`."""
        for path in self._paths:
            count = self._counts.get(path)
            if count is not None and count <= skip:
                skip -= count
                continue
            num_rows = 0
            for num_rows, value in enumerate(_read_values(self._data, path), 1):
                if skip:
                    skip -= 1
                else:
                    yield _Record(path, num_rows - 1, value)
            if count not in (None, num_rows):
                raise OSError(
                    "A file must contain the number of rows that was counted. "
                    f"Received: {path} with {num_rows} rows, although {count} "
                    "were counted. Check what `count` returns, and make sure "
                    "that no other program writes to the file."
                )

    def label(self, item: _Record) -> str:
        """Returns text that identifies an item and its file, for checksums."""
        return f"{os.path.basename(item.path)} {item.index}"

    def read(self, items: Sequence[_Record]) -> Tree:
        """Parses records and stacks them into arrays of shape (rows, ...)."""
        path, index = items[0].path, items[0].index
        where = f", from {path}, starting with record {index}"
        rows = [self._parse(item) for item in items]
        fix = "Pad the rows in `parse`, or in the reader that yields them."
        return stack_rows(rows, fix, where)

    def _parse(self, record: _Record) -> Tree:
        if self._data.parse is None:
            return record.value
        with _explain_errors(lambda: f"{record.path}, record {record.index}"):
            return self._data.parse(record.value)


def iterate_batches(
    rows: ArrayRows | RecordRows,
    start: int,
    size: int,
    window: int,
    key: tuple[int, ...],
) -> Iterator[list[Any]]:
    """Yields one list of items for each batch.

    Args:
      rows: The rows.
      start: Number of rows to skip at the beginning.
      size: Number of rows in a batch.
      window: Number of consecutive rows that are shuffled together; 0 for no
        shuffling.
      key: The seed for shuffling, as integers.
    """
    items = _shuffle(rows, start, window, key) if window else rows.items(start)
    while batch := list(itertools.islice(items, size)):
        yield batch


def _shuffle(
    rows: ArrayRows | RecordRows, start: int, window: int, key: tuple[int, ...]
) -> Iterator[Any]:
    # Each window has a separate shuffle order. So resuming skips all windows
    # before `start` without shuffling them, and then the first rows of the
    # window that contains `start`.
    number, skip = divmod(start, window)
    items = rows.items(number * window)
    while in_window := list(itertools.islice(items, window)):
        generator = np.random.default_rng((*key, number))
        order = generator.permutation(len(in_window))[skip:].tolist()
        yield from map(in_window.__getitem__, order)
        number, skip = number + 1, 0


def count_array_rows(data: Files) -> dict[str, int]:
    """Returns the number of rows in each array file, read from its header.

    Raises ValueError unless all files contain the same arrays.
    """
    counts, expected = {}, None
    for path in data.paths:
        arrays = _read_arrays(data, path, with_data=False)
        rows = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(rows.values())) != 1:
            raise ValueError(
                "All arrays in a file must have the same number of rows. "
                f"Received: {path} with the numbers of rows {rows}. Use `keys` "
                "to select arrays of equal length."
            )
        spec = {n: (a.dtype, a.shape[1:]) for n, a in arrays.items()}
        expected = spec if expected is None else expected
        if spec != expected:
            raise ValueError(
                "The arrays in all files must have the same names, dtypes and "
                f"row shapes. Received: {spec} in {path}, {expected} in "
                f"{data.paths[0]}. Use `keys` to select arrays that are in all "
                "files."
            )
        counts[path] = next(iter(rows.values()))
    return counts


def count_records(data: Files, path: str) -> int:
    """Returns the number of rows in a record file."""
    if callable(data.count):
        return data.count(path)
    return sum(1 for _ in _read_values(data, path))


def _read_batch(data: Files, path: str) -> Tree:
    arrays = _read_arrays(data, path)
    if data.reader == "npy":
        return arrays[""]
    if isinstance(data.keys, str):
        return arrays[data.keys]
    return arrays if data.keys is None else tuple(arrays[n] for n in data.keys)


def _read_arrays(
    data: Files, path: str, with_data: bool = True
) -> dict[str, np.ndarray]:
    """Returns a file's arrays by name; memory-mapped unless compressed."""
    with _explain_errors(lambda: path), open(path, "rb") as file:
        if data.reader == "npy":
            return {"": _map(file, 0)}
        arrays = {}
        with zipfile.ZipFile(file) as archive:
            names = [data.keys] if isinstance(data.keys, str) else data.keys
            if names is None:
                names = [n.removesuffix(".npy") for n in archive.namelist()]
            for name in names:
                info = archive.getinfo(f"{name}.npy")
                with archive.open(info) as member:
                    shape, _, dtype = _read_header(member)
                if info.compress_type == zipfile.ZIP_STORED:
                    # A zip member's name and extra field are stored between its
                    # header and its data; the header contains their lengths.
                    file.seek(info.header_offset + 26)
                    extra = sum(struct.unpack("<HH", file.read(4)))
                    arrays[name] = _map(file, info.header_offset + 30 + extra)
                elif with_data:
                    with archive.open(info) as member:
                        arrays[name] = npy.read_array(member)
                else:
                    arrays[name] = np.broadcast_to(np.zeros((), dtype), shape)
        return arrays


def _map(file: IO[bytes], offset: int) -> np.ndarray:
    file.seek(offset)
    shape, is_fortran, dtype = _read_header(file)
    order = "F" if is_fortran else "C"
    return np.memmap(file, dtype, "r", file.tell(), shape, order)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    read = npy.read_array_header_2_0
    if version == (1, 0):
        read = npy.read_array_header_1_0
    shape, is_fortran, dtype = read(file)
    if not shape or dtype.kind in "OSUVmM":
        raise ValueError(
            f"it contains an array with shape {shape} and dtype {dtype}, but "
            "arrays must contain rows of numbers or booleans"
        )
    return shape, is_fortran, dtype


def _read_values(data: Files, path: str) -> Iterator[Any]:
    """Yields the values in a record file."""
    index = 0
    with _explain_errors(lambda: f"{path}, record {index}"):
        readers = {"text": _read_lines, "tfrecord": _read_tfrecords}
        read = data.reader if callable(data.reader) else readers[data.reader]
        for value in read(path):
            yield value
            index += 1


def _read_tfrecords(path: str) -> Iterator[Any]:
    import tensorflow as tf

    hide_gpus()
    left = os.path.getsize(path)
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        yield record
        left -= len(record) + _TFRECORD_FRAME
    # TensorFlow (2.21) treats a record that is cut off as the end of the file
    # and raises no error; test_tfrecords checks this.
    if left:
        place = f"{left} bytes after its last complete record"
        raise EOFError(f"the file ends {place}")


def _read_lines(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.removesuffix("\n")


@contextlib.contextmanager
def _explain_errors(place: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OSError(
            f"A file could not be read. Received: {place()}: "
            f"{type(error).__name__}: {error}. Write the file again, or remove "
            "it from the dataset."
        ) from error


def _to_slice(indices: np.ndarray) -> np.ndarray | slice:
    """Returns indices as a slice if they are consecutive."""
    if np.all(np.diff(indices) == 1):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
