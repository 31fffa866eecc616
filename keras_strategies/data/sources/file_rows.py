"""The rows of array files, texts and files of records."""

import contextlib
import dataclasses
import itertools
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from numpy.lib import format as npy

from keras_strategies.data.own_rows import stack_rows
from keras_strategies.data.sources.files import Files
from keras_strategies.data.sources.mapped_arrays import release

Tree = Any
_Key = tuple[int, ...]

_MAX_OPEN = 64
# Bytes around a record: its length and two checksums.
_TFRECORD_FRAME = 16


class _Record(NamedTuple):
    """What a file holds at an index: a line, the bytes of a record, a row."""

    path: str
    index: int
    value: Any


@dataclasses.dataclass
class _FileRows:
    """Rows of files in a sequence.

    Args:
      data: All files.
      paths: Those that are read, in their order.
      counts: Their numbers of rows, as far as they are known.
      key: What their shuffling is drawn from.
    """

    _data: Files
    _paths: Sequence[str]
    _counts: dict[str, int]
    _key: _Key


@dataclasses.dataclass
class ArrayRows(_FileRows):
    """Rows of array files, by their positions in the sequence of all."""

    def __post_init__(self) -> None:
        counts = (self._counts[path] for path in self._paths)
        self._ends = np.cumsum([0, *counts])
        self._names = ",".join(map(os.path.basename, self._paths))
        self._open: dict[int, Tree] = {}
        self._window = (-1, np.zeros(0, int))

    def checksum(self, first: int, last: int) -> int:
        """A checksum of which rows these are; see `Part`."""
        return zlib.crc32(f"{self._names} {first} {last}".encode())

    def batches(self, start: int, size: int) -> Iterator[np.ndarray]:
        """The positions of the rows of each batch, from one of them on."""
        total = self._ends[-1]
        for first in range(start, total, size):
            last = min(first + size, total)
            window = self._data.window
            if not window:
                yield np.arange(first, last)
                continue
            numbers = range(first // window, (last - 1) // window + 1)
            shuffled = [
                self._shuffled(number, total)[
                    max(first - number * window, 0) : last - number * window
                ]
                for number in numbers
            ]
            yield np.concatenate(shuffled)

    def _shuffled(self, number: int, total: int) -> np.ndarray:
        if self._window[0] != number:
            first = number * self._data.window
            rows = min(self._data.window, total - first)
            order = _permutation(self._key, number, rows)
            self._window = number, first + order
        return self._window[1]

    def data(self, positions: np.ndarray) -> Tree:
        """The rows at these positions."""
        numbers = np.searchsorted(self._ends, positions, side="right") - 1
        nest, leaves = None, []
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            rows = _sliced(positions[at] - self._ends[number])
            arrays, nest = jax.tree.flatten(self._opened(number))
            leaves = leaves or [
                np.empty(
                    (len(positions), *array.shape[1:]),
                    array.dtype.newbyteorder("="),
                )
                for array in arrays
            ]
            for leaf, array in zip(leaves, arrays, strict=True):
                leaf[_sliced(at)] = array[rows]
                release(array.base)
        return jax.tree.unflatten(nest, leaves)

    def _opened(self, number: int) -> Tree:
        if number not in self._open:
            if len(self._open) == _MAX_OPEN:
                del self._open[next(iter(self._open))]
            arrays = _arrays_of(self._data, self._paths[number])
            self._open[number] = _batch_of(self._data, arrays)
        return self._open[number]


class RecordRows(_FileRows):
    """Rows that files yield one after the other."""

    def checksum(self, first: _Record, last: _Record) -> int:
        """A checksum of which records these are; see `Part`."""
        places = [(os.path.basename(r.path), r.index) for r in (first, last)]
        return zlib.crc32(repr(places).encode())

    def batches(self, start: int, size: int) -> Iterator[list[_Record]]:
        """The records of each batch, from one of them on."""
        records = self._records(start)
        if self._data.window:
            records = self._shuffled(start)
        while batch := list(itertools.islice(records, size)):
            yield batch

    def _shuffled(self, start: int) -> Iterator[_Record]:
        window = self._data.window
        number, skip = divmod(start, window)
        records = self._records(number * window)
        while held := list(itertools.islice(records, window)):
            for place in _permutation(self._key, number, len(held))[skip:]:
                yield held[place]
            number, skip = number + 1, 0

    def _records(self, skip: int) -> Iterator[_Record]:
        for path in self._paths:
            count = self._counts.get(path)
            if count is not None and count <= skip:
                skip -= count
                continue
            found = 0
            for value in _values(self._data, path):
                if skip:
                    skip -= 1
                else:
                    yield _Record(path, found, value)
                found += 1
            if count not in (None, found):
                raise OSError(
                    "A file must hold as many rows as were counted. Received: "
                    f"{path} with {found} rows, counted {count}. Check "
                    "`count`, and that nobody writes to the file."
                )

    def data(self, records: list[_Record]) -> Tree:
        """The rows that the records hold."""
        rows = [self._parsed(record) for record in records]
        where = f", from {records[0].path}, record {records[0].index}, on"
        return stack_rows(rows, "Pad them in `parse`.", where)

    def _parsed(self, record: _Record) -> Tree:
        if self._data.parse is None:
            return record.value
        with _reading(record.path, record.index):
            return self._data.parse(record.value)


def counts_of_arrays(data: Files) -> dict[str, int]:
    """The numbers of rows, from the headers, which must be alike."""
    counts, expected = {}, None
    for path in data.paths:
        arrays = _arrays_of(data, path, with_data=False)
        rows = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(rows.values())) != 1:
            raise ValueError(
                "The arrays of a file must have the same number of rows. "
                f"Received: {path} with {rows}. Leave others out with `keys`."
            )
        spec = {n: (a.dtype, a.shape[1:]) for n, a in arrays.items()}
        expected = spec if expected is None else expected
        if spec != expected:
            raise ValueError(
                "The arrays of all files must have the same names, dtypes and "
                f"shapes of rows. Received: {spec} in {path}, {expected} in "
                f"{data.paths[0]}. Choose those that agree with `keys`."
            )
        counts[path] = next(iter(rows.values()))
    return counts


def _arrays_of(
    data: Files, path: str, with_data: bool = True
) -> dict[str, np.ndarray]:
    """The arrays of a file by name; mapped, if they are not compressed."""
    with _reading(path), open(path, "rb") as file:
        if data.reader == "npy":
            return {"": _mapped(file, 0)}
        arrays = {}
        with zipfile.ZipFile(file) as archive:
            names = [data.keys] if isinstance(data.keys, str) else data.keys
            if names is None:
                names = [n.removesuffix(".npy") for n in archive.namelist()]
            for name in names:
                info = archive.getinfo(f"{name}.npy")
                if info.compress_type == zipfile.ZIP_STORED:
                    file.seek(info.header_offset + 26)
                    extra = sum(struct.unpack("<HH", file.read(4)))
                    offset = info.header_offset + 30 + extra
                    arrays[name] = _mapped(file, offset)
                    continue
                with archive.open(info) as member:
                    if with_data:
                        arrays[name] = npy.read_array(member)
                    else:
                        shape, _, dtype = _header(member)
                        one = np.zeros((), dtype)
                        arrays[name] = np.broadcast_to(one, shape)
        return arrays


def _mapped(file: Any, offset: int) -> np.ndarray:
    """An array of a file, read when it is used."""
    file.seek(offset)
    shape, is_fortran, dtype = _header(file)
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    order = "F" if is_fortran else "C"
    return np.ndarray(shape, dtype, memory, file.tell(), order=order)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(file)
    read = npy.read_array_header_2_0
    if version == (1, 0):
        read = npy.read_array_header_1_0
    shape, is_fortran, dtype = read(file)
    if not shape or dtype.kind in "OSUVmM":
        raise ValueError(
            f"an array of shape {shape} and dtype {dtype}, where rows of "
            "numbers or booleans are needed"
        )
    return shape, is_fortran, dtype


def _batch_of(data: Files, arrays: dict[str, np.ndarray]) -> Tree:
    if data.reader == "npy":
        return arrays[""]
    if isinstance(data.keys, str):
        return arrays[data.keys]
    return arrays if data.keys is None else tuple(arrays[n] for n in data.keys)


def count_of(data: Files, path: str) -> int:
    """How many rows a file holds."""
    if callable(data.count):
        return data.count(path)
    return sum(1 for _ in _values(data, path))


def _values(data: Files, path: str) -> Iterator[Any]:
    """What a file of records holds, one after the other."""
    index = 0
    try:
        for value in _opened_records(data, path):
            yield value
            index += 1
    except Exception as error:
        _refuse(path, index, error)


def _opened_records(data: Files, path: str) -> Iterable[Any]:
    if callable(data.reader):
        return data.reader(path)
    return _lines(path) if data.reader == "text" else _tfrecords(path)


def _tfrecords(path: str) -> Iterator[Any]:
    import tensorflow as tf

    left = os.path.getsize(path)
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
        yield record
        left -= len(record) + _TFRECORD_FRAME
    # TensorFlow (2.21) takes a record whose first bytes are all there is of
    # it for the end of the file; test_tfrecords sees it.
    if left:
        raise EOFError(f"the file ends {left} bytes after its last record")


def _lines(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.removesuffix("\n")


@contextlib.contextmanager
def _reading(path: str, index: int | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _refuse(path, index, error)


def _refuse(path: str, index: int | None, error: Exception) -> NoReturn:
    record = "" if index is None else f", record {index}"
    raise OSError(
        f"A file could not be read. Received: {path}{record}: "
        f"{type(error).__name__}: {error}. Write it anew, or leave it out."
    ) from error


def _permutation(key: _Key, number: int, rows: int) -> np.ndarray:
    return np.random.default_rng((*key, number)).permutation(rows)


def _sliced(indices: np.ndarray) -> Any:
    """The same as a slice, where they are consecutive."""
    if np.all(np.diff(indices) == 1):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
