"""Finding, reading and hashing a checkpoint's files without following links."""

import contextlib
import errno
import hashlib
import io
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
)
from keras_strategies.cluster.untrusted import load_json

_MAX_SHOWN = 160
_FIX = (
    "This checkpoint is not restored. Use an earlier step, restore this "
    "directory from a copy, or delete it."
)


class DamagedCheckpoint(ValueError):
    """The error for a damaged checkpoint, which differs from what was saved.

    A damaged checkpoint is never restored.

    Attributes:
      path: The checkpoint's directory; None if unknown.
      file: The damaged file, relative to `path`; None if the directory itself
        is damaged or missing.
      problem: A short description of the damage, for a table.

    Example:
      ```python
      manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
      manager.save(step=100)
      manager.close()
      try:
          manager.restore(step=200)
      except ks.checkpoint.DamagedCheckpoint as error:
          print(error.path, error.problem)
      ```
    """

    def __init__(
        self,
        message: str,
        *,
        path: pathlib.Path | None = None,
        file: str | None = None,
        problem: str = "",
    ):
        super().__init__(message)
        self.path = path
        self.file = file
        self.problem = problem or message


def make_damage_error(
    path: str | os.PathLike[str],
    file: str | None,
    problem: str,
    fix: str = _FIX,
) -> DamagedCheckpoint:
    """Makes the error for a damaged checkpoint.

    Args:
      path: The checkpoint's directory.
      file: The damaged file or directory, relative to `path`; None for `path`
        itself.
      problem: A description of the damage, such as "its checksum differs".
      fix: Advice to the user, which ends the message.
    """
    short = problem if file is None else f"{quote_name(file)}: {problem}"
    name = quote_name(os.fspath(path))
    return DamagedCheckpoint(
        f"The checkpoint {name} is damaged: {short}. {fix}",
        path=pathlib.Path(path),
        file=file,
        problem=short,
    )


def quote_name(name: str) -> str:
    """Formats a name for a message; quotes it if it has unusual characters."""
    text = name
    if not (name.isprintable() and name.isascii() and name) or " " in name:
        text = ascii(name[: _MAX_SHOWN + 1])
    return text if len(name) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


NO_LINKS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""The flags for opening files without following links or waiting for pipes."""

_NOT_KNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
_GONE = "it was deleted while it was read"
_LINK = "it is a symbolic link"


def find_files(path: pathlib.Path) -> dict[str, int]:
    """Finds the files of a checkpoint, except for its manifest.

    Args:
      path: The checkpoint's directory.

    Returns:
      The size of each file in bytes, by its name relative to `path`, with `/`
      as the separator.

    Raises:
      DamagedCheckpoint: if the directory contains a link, or anything else that
        is neither a file nor a directory. The message names it.
    """
    check_directory(path)
    sizes: dict[str, int] = {}
    with translate_errors(path):
        for name, status in _walk(path):
            if stat.S_ISLNK(status.st_mode):
                raise make_damage_error(path, name, _LINK)
            if not stat.S_ISREG(status.st_mode):
                problem = "it is neither a file nor a directory"
                raise make_damage_error(path, name, problem)
            if name != MANIFEST:
                sizes[name] = status.st_size
    return sizes


def check_directory(path: pathlib.Path) -> None:
    """Checks that a path is a directory, and not a link to a directory.

    Raises:
      DamagedCheckpoint: if the path is anything else, or does not exist.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        problem, fix = "the directory does not exist", "Use another step."
        raise make_damage_error(path, None, problem, fix) from None
    if not stat.S_ISDIR(status.st_mode):
        is_link = stat.S_ISLNK(status.st_mode)
        problem = _LINK if is_link else "it is not a directory"
        raise make_damage_error(path, None, problem)


@contextlib.contextmanager
def translate_errors(
    path: pathlib.Path, name: str | None = None
) -> Iterator[None]:
    """Converts OSErrors while the block reads a file of a checkpoint.

    The resulting errors name the checkpoint and the file.

    Args:
      path: The checkpoint's directory.
      name: The file, relative to `path`; None for the directory itself.

    Raises:
      DamagedCheckpoint: in place of an OSError that the block raises.
    """
    try:
        yield
    except FileNotFoundError:
        problem = _GONE if not path.exists() else "it is missing"
        raise make_damage_error(path, name, problem) from None
    except OSError as error:
        problem = f"it cannot be read: {error.strerror or type(error).__name__}"
        if error.errno == errno.ELOOP:
            problem = _LINK
        raise make_damage_error(path, name, problem) from error


@contextlib.contextmanager
def open_file(path: pathlib.Path, name: str) -> Iterator[io.FileIO]:
    """Opens a file of a checkpoint, unless it is a link.

    Raises:
      DamagedCheckpoint: if the file is missing, is not a regular file, or
        cannot be read.
    """
    with (
        translate_errors(path, name),
        io.FileIO(os.open(path / name, NO_LINKS), "rb") as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise make_damage_error(path, name, "it is not a file")
        yield file


def load_object(
    path: pathlib.Path, name: str, max_bytes: int, what: str
) -> dict[str, Any]:
    """Loads a JSON object of bounded depth from a checkpoint's file.

    Args:
      path: The checkpoint's directory.
      name: The file, relative to `path`.
      max_bytes: The maximum size of the file, in bytes.
      what: A name for the expected content in the error, such as "document".

    Raises:
      DamagedCheckpoint: if the file is missing, cannot be read, or does not
        contain a JSON object.
    """
    with open_file(path, name) as file:
        text = file.read(max_bytes + 1) or b""
    try:
        content = load_json(text, max_characters=max_bytes, has_nan=True)
    except ValueError as error:
        raise make_damage_error(
            path, name, f"it is not a valid {what}: {error}"
        ) from None
    if not isinstance(content, dict):
        raise make_damage_error(path, name, "it is not a JSON object")
    return content


def compute_digest(path: pathlib.Path, name: str) -> str:
    """Computes the sha256 of a checkpoint's file, in hexadecimal digits.

    Args:
      path: The checkpoint's directory.
      name: The file, relative to `path`.

    Raises:
      DamagedCheckpoint: if the file is missing, is not a regular file, or
        cannot be read.
    """
    with open_file(path, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure_size(path: pathlib.Path) -> int:
    """Returns the size of all files in a directory, in bytes.

    Links are not followed. Returns 0 for a directory whose files cannot be
    read, for example because they are deleted at the same time.
    """
    try:
        return sum(status.st_size for _, status in _walk(path))
    except OSError:
        return 0


def flush(path: pathlib.Path) -> None:
    """Flushes a file's contents, or the list of files in a directory, to disk.

    Raises:
      OSError: if the disk failed or is full.
    """
    descriptor = os.open(path, NO_LINKS)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync.
        if error.errno not in _NOT_KNOWN:
            raise
    finally:
        os.close(descriptor)


def _walk(path: pathlib.Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yields everything in a directory and below, except directories.

    Does not follow links. The order is always the same, so that errors are
    reproducible.
    """
    directories = [""]
    # The list grows during the loop. Recursion is not used because it could
    # exceed Python's limit.
    for directory in directories:
        with os.scandir(path / directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            name = f"{directory}/{entry.name}" if directory else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                directories.append(name)
            else:
                yield name, status
