"""Files given directly, without a pipeline that reads them."""

import dataclasses
import glob
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.data.file_rows import (
    ArrayRows,
    RecordRows,
    count_of,
    counts_of_arrays,
)
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.outline import Outline, Reading
from keras_strategies.data.source import Cut, Part, Source, all_rows

Tree = Any
Reader = str | Callable[[str], Iterable[Tree]]

_ARRAYS = ("npz", "npy")
_RECORDS = ("text", "tfrecord")
_WINDOW = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """Files and how their rows are read; made by `files`.

    Attributes:
      paths: The files, in their order.
      reader: Their format, or a function that yields a file's rows.
      batch_size: Rows of a global batch.
      keys: Of "npz": the names of the arrays of a batch.
      parse: Makes a row of a record.
      count: How a file's rows are counted, or whether they are.
      window: How many consecutive rows are shuffled among each other, or 0.
      seed: Of the shuffling; None is the strategy's.
      drop_remainder: Whether a last, smaller batch is left out.
    """

    paths: tuple[str, ...]
    reader: Reader
    batch_size: int
    keys: str | tuple[str, ...] | None = None
    parse: Callable[[Any], Tree] | None = None
    count: Callable[[str], int] | bool = False
    window: int = 0
    seed: int | None = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(
                "`batch_size` must be positive. Received: "
                f"{self.batch_size}. Give the rows of a global batch."
            )
        if self.window < 0:
            raise ValueError(
                "`shuffle` must be True, False or a number of rows. Received: "
                f"{self.window}. Use True for windows of {_WINDOW} rows."
            )
        if not callable(self.reader) and self.reader not in _ARRAYS + _RECORDS:
            raise ValueError(
                "`reader` must be one of 'npz', 'npy', 'text', 'tfrecord' or "
                f"a function of a path. Received: {self.reader!r}. Write a "
                "generator of rows for other formats."
            )
        if (self.reader in _RECORDS) != (self.parse is not None):
            raise ValueError(
                "`parse` makes a row of each record of 'text' and 'tfrecord' "
                f"files, and of no others. Received: reader={self.reader!r}, "
                f"parse={self.parse!r}. Give a function of a str (text) or of "
                "bytes (tfrecord) that returns a nest of arrays."
            )
        if self.keys is not None and self.reader != "npz":
            raise ValueError(
                "`keys` names arrays of 'npz' files. Received: reader="
                f"{self.reader!r}, keys={self.keys!r}. Leave it out."
            )
        if self.reader == "tfrecord" and not importlib.util.find_spec(
            "tensorflow"
        ):
            raise ImportError(
                "TFRecord files are read with TensorFlow, which is not "
                "installed. Run `pip install tensorflow-cpu`."
            )


def files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    reader: Reader,
    *,
    batch_size: int,
    keys: str | Sequence[str] | None = None,
    parse: Callable[[Any], Tree] | None = None,
    count: Callable[[str], int] | bool = False,
    shuffle: bool | int = False,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Files:
    """Describes a dataset of files, for `fit` and distributed datasets.

    The files' rows form one sequence: the files in sorted order, the rows of
    each in its own. With several processes and as many files or more, each
    process reads whole files (`AutoShardPolicy.AUTO` and `FILE`). Otherwise
    (`DATA`) each takes its rows of every batch of the sequence: of "npz" and
    "npy" it reads these only (if they are not compressed); of others all, of
    which it parses its own.

    Args:
      pattern: A path, a glob ("**" for any folders), or several paths.
      reader: What the files hold. "npz": arrays of equal length, of which
        each batch is a dict (or see `keys`). "npy": one array. "text": lines.
        "tfrecord": records. Or a function of a path that yields its rows: in
        the same order whenever it is called, each in arrays of its own.
      batch_size: Rows of a global batch.
      keys: The arrays of "npz" files that make a batch: a tuple of these, or
        of one name that array.
      parse: Makes a row of a line (str) or a record (bytes): a nest of arrays
        that all rows have alike.
      count: Returns the number of rows of a file, or True to find it by
        reading each file once more, in every process. With it the length is
        known ahead, and resuming opens no file that was read before. Numbers
        of rows of "npz" and "npy" are always known.
      shuffle: Whether the files are put in another order each epoch, and
        windows of 10000 consecutive rows are shuffled; an int is another size
        of these windows. Records of a window are held in memory.
      seed: Of the shuffling. The order depends on it and the epoch only.
      drop_remainder: Whether a last, smaller batch is left out; where each
        process reads whole files, of those of each process.

    Raises:
      ValueError: no file was found, or the arguments do not fit together.
      FileNotFoundError: a path does not exist.

    Example:
      ```python
      train = ks.data.files(
          "train/*.npz", "npz", keys=("x", "y"), batch_size=256, shuffle=True
      )
      model.fit(train, epochs=3)
      ```
    """
    return Files(
        paths=_found(pattern),
        reader=reader,
        batch_size=batch_size,
        keys=keys if isinstance(keys, str | None) else tuple(keys),
        parse=parse,
        count=count,
        window=_WINDOW if shuffle is True else int(shuffle),
        seed=seed,
        drop_remainder=drop_remainder,
    )


class FilesSource(Source):
    """The rows of files.

    Args:
      data: The files.
      num_processes: Number of processes that read them.
      process_index: This process's place among them.
      seed: Of the shuffling, where `data` has none. The same in all
        processes.
      policy: FILE gives each process whole files, DATA its rows of each
        batch, OFF all rows to each; AUTO is FILE where there are enough
        files, else DATA.

    Raises:
      ValueError: HINT, or FILE with fewer files than processes; or the files'
        arrays are unlike.
      OSError: a file could not be read.
    """

    kind = "files"

    def __init__(
        self,
        data: Files,
        *,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
        policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    ) -> None:
        self._data = data
        self._num_processes = num_processes
        self._process_index = process_index
        self._seed = (seed if data.seed is None else data.seed) % 2**64
        self._is_by_file = _is_by_file(data, num_processes, policy)
        self.is_own = self._is_by_file or (
            num_processes > 1 and policy is AutoShardPolicy.OFF
        )
        self.batch_size = data.batch_size
        self._counts: dict[str, int] = {}
        if data.reader in _ARRAYS:
            self._counts = counts_of_arrays(data)
        elif data.count is not False and not self.is_own:
            self._counts = {path: count_of(data, path) for path in data.paths}
        if self._counts and not self.is_own:
            whole, rest = divmod(sum(self._counts.values()), data.batch_size)
            self.num_batches = whole + bool(rest and not data.drop_remainder)

    def outline(self) -> Outline:
        """See `Source.outline`."""
        said, data = super().outline(), self._data
        files = dict.fromkeys(range(self._num_processes), data.paths)
        if self._is_by_file:
            files = {process: self.assigned_files(process) for process in files}
            said = Outline(
                applied=AutoShardPolicy.FILE,
                reason="there is a file for each process",
            )
        is_array = data.reader in _ARRAYS
        note = "The files are shuffled anew in each epoch."
        return dataclasses.replace(
            said,
            reading=Reading.ROWS if is_array else Reading.PIPELINE,
            num_rows=sum(self._counts.values()) or None,
            files=files,
            notes=(note,) if data.window else (),
        )

    @property
    def seed(self) -> int:
        """See `Source.seed`."""
        return self._seed

    def restart(self, seed: str | int | None) -> None:
        """See `Source.restart`."""
        if seed is not None:
            self._seed = int(seed)

    def assigned_files(
        self, process_index: int, epoch: int = 0
    ) -> tuple[str, ...]:
        """The files that a process reads in an epoch, in their order.

        Args:
          process_index: Which of the processes.
          epoch: Number of the epoch, from 0.
        """
        paths = self._data.paths
        if self._data.window:
            rng = np.random.default_rng((self._seed, epoch))
            paths = tuple(paths[i] for i in rng.permutation(len(paths)))
        if not self._is_by_file:
            return paths
        return paths[process_index :: self._num_processes]

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source`."""
        paths = self.assigned_files(self._process_index, epoch)
        size = self._data.batch_size
        key = (self._seed, epoch, 0)
        if self._is_by_file:
            size = -(-size // self._num_processes)
            key = (self._seed, epoch, 1 + self._process_index)
        if self.is_own:
            cut = all_rows
        is_array = self._data.reader in _ARRAYS
        kind: Any = ArrayRows if is_array else RecordRows
        rows = kind(self._data, paths, self._counts, key)
        none: Tree = None
        for batch in rows.batches(start * size, size):
            count = len(batch)
            if count < size and self._data.drop_remainder:
                return
            begin, end = cut(count)
            mark = rows.mark(batch[0], batch[-1])
            if begin == end and none is not None:
                yield Part(data=none, rows=count, mark=mark)
                continue
            data = rows.data(batch[begin:end] if begin < end else batch[:1])
            if none is None:
                none = jax.tree.map(lambda leaf: leaf[:0], data)
            yield Part(
                data=data if begin < end else none, rows=count, mark=mark
            )


def _found(pattern: Any) -> tuple[str, ...]:
    """The files that a pattern names, sorted: alike in every process."""
    if not isinstance(pattern, str | os.PathLike):
        paths = [os.fspath(path) for path in pattern]
    elif os.path.lexists(pattern):
        paths = [os.fspath(pattern)]
    else:
        matches = glob.glob(os.fspath(pattern), recursive=True)
        paths = [path for path in matches if os.path.isfile(path)]
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"Every path must be a file. Received: {path}, which is "
                f"{'a folder' if os.path.isdir(path) else 'missing'}. Give "
                "existing files, or a glob as in 'folder/*.npz'."
            )
    if not paths:
        raise ValueError(
            "A dataset of files needs one file at least. Received: "
            f"{pattern!r}, which matches none in {os.getcwd()}. Check the "
            "pattern; it is relative to that folder."
        )
    return tuple(sorted(paths))


def _is_by_file(
    data: Files, num_processes: int, policy: AutoShardPolicy
) -> bool:
    """Whether each process reads whole files."""
    if policy is AutoShardPolicy.HINT:
        raise ValueError(
            "HINT is for a `tf.data.Dataset` with `shard(SHARD_HINT, ...)`. "
            "Received: AutoShardPolicy.HINT for files. Use AUTO, FILE, DATA or "
            "OFF."
        )
    by_rows = (AutoShardPolicy.DATA, AutoShardPolicy.OFF)
    if num_processes == 1 or policy in by_rows:
        return False
    if len(data.paths) >= num_processes:
        return True
    reason = (
        "Each process needs one file at least to read whole files. Received: "
        f"{len(data.paths)} files for {num_processes} processes. "
    )
    if policy is AutoShardPolicy.FILE:
        raise ValueError(f"{reason}Write more files, or use AUTO or DATA.")
    cost = "opens all files and reads its rows of each batch"
    if data.reader not in _ARRAYS:
        cost = "reads all files and keeps its rows of each batch"
    warnings.warn(
        f"{reason}AutoShardPolicy.AUTO becomes DATA: each process {cost}. "
        "Write more files, or set DATA.",
        stacklevel=4,
    )
    return False
