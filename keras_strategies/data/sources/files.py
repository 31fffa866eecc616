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
    """Files and how their rows are read; see `files`, which makes them.

    Attributes:
      paths: The files, in their order.
      window: How many consecutive rows are shuffled among each other, or 0.

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
                f"{self.batch_size}. Give the rows of a global batch."
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
      seed: The shuffling's. The order depends on it and the epoch only.
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


def _found(pattern: Any) -> tuple[str, ...]:
    """The files that a pattern names, sorted: alike in every process."""
    is_one = isinstance(pattern, str | os.PathLike)
    paths = [os.fspath(path) for path in ([pattern] if is_one else pattern)]
    if is_one and not os.path.lexists(pattern):
        matches = glob.glob(paths[0], recursive=True)
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
