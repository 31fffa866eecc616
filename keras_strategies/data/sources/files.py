"""Descriptions of files whose rows are a dataset."""

import dataclasses
import glob
import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_strategies._types import Tree

Reader = str | Callable[[str], Iterable[Tree]]

ARRAYS = ("npz", "npy")
RECORDS = ("text", "tfrecord")
_WINDOW = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """Files and how their rows are read. `files` makes this object.

    Attributes:
      paths: The files, in order.
      window: Number of consecutive rows that are shuffled among each other, or
        0.

    Example:
      >>> files = ks.data.files("train/*.npz", "npz", batch_size=64)
      >>> isinstance(files, ks.data.Files), len(files.paths)
      (True, 2)
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
                f"{self.batch_size}. Pass the number of rows of a global batch."
            )
        if self.window < 0:
            raise ValueError(
                "`shuffle` must be True, False or a number of rows. Received: "
                f"{self.window}. Use True for windows of {_WINDOW} rows."
            )
        if not callable(self.reader) and self.reader not in ARRAYS + RECORDS:
            raise ValueError(
                "`reader` must be one of 'npz', 'npy', 'text', 'tfrecord' or "
                f"a function of a path. Received: {self.reader!r}. Write a "
                "generator of rows for other formats."
            )
        if (self.reader in RECORDS) != (self.parse is not None):
            raise ValueError(
                "`parse` must be set for 'text' and 'tfrecord' files, and only "
                f"for these. Received: reader={self.reader!r}, "
                f"parse={self.parse!r}. Pass a function of a str (text) or of "
                "bytes (tfrecord) that returns a nest of arrays."
            )
        if self.keys is not None and self.reader != "npz":
            raise ValueError(
                "`keys` must be left out except for 'npz' files. Received: "
                f"reader={self.reader!r}, keys={self.keys!r}. Leave it out."
            )
        if self.reader == "tfrecord" and not importlib.util.find_spec(
            "tensorflow"
        ):
            raise ImportError(
                "Reading TFRecord files needs TensorFlow, which is not "
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
    each file in order. If there is at least one file for each of several
    processes, each process reads entire files (`AutoShardPolicy.AUTO` and
    `FILE`). Otherwise (`DATA`) each takes its rows of every batch of the
    sequence. Of "npz" and "npy" files it reads only these rows (if they are not
    compressed); of other files it reads all rows and parses only these.

    Args:
      pattern: A path, a glob ("**" for any folders), or several paths.
      reader: The format of the files. "npz": arrays of equal length; each batch
        is a dict (or see `keys`). "npy": one array. "text": lines. "tfrecord":
        records. Or a function of a path that yields rows: in the same order at
        every call, each in new arrays.
      batch_size: Number of rows of a global batch.
      keys: The arrays of "npz" files that make a batch: a tuple of these arrays
        for several names, or the array itself for one name (a str).
      parse: A function from a line (str) or a record (bytes) to a row: a nest
        of arrays with the same structure and shapes in all rows.
      count: A function from a file to its number of rows, or True to count them
        by reading each file once more, in every process. The length is then
        known in advance, and resuming opens no file that was already read. The
        numbers of rows of "npz" and "npy" files are always known.
      shuffle: Whether to reorder the files each epoch and to shuffle windows of
        10000 consecutive rows; an int is another size of these windows. The
        records of a window are held in memory.
      seed: The seed of the shuffling. The order depends only on it and the
        epoch.
      drop_remainder: Whether to drop a last, smaller batch. If each process
        reads entire files, each drops its last, smaller batch.

    Raises:
      ValueError: if no file was found, or the arguments do not fit together.
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
        parse=parse,
        count=count,
        window=_WINDOW if shuffle is True else int(shuffle),
        seed=seed,
        drop_remainder=drop_remainder,
    )


def _find_files(pattern: Any) -> tuple[str, ...]:
    """Returns the files of a pattern, sorted: the same in every process."""
    is_one = isinstance(pattern, str | os.PathLike)
    paths = [os.fspath(path) for path in ([pattern] if is_one else pattern)]
    if is_one and not os.path.lexists(pattern):
        matches = glob.glob(paths[0], recursive=True)
        paths = [path for path in matches if os.path.isfile(path)]
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"Every path must be a file. Received: {path}, which is "
                f"{'a folder' if os.path.isdir(path) else 'missing'}. Pass "
                "existing files, or a glob such as 'folder/*.npz'."
            )
    if not paths:
        raise ValueError(
            "A dataset of files needs at least one file. Received: "
            f"{pattern!r}, which matches no file in {os.getcwd()}. Check the "
            "pattern; it is relative to that folder."
        )
    return tuple(sorted(paths))
