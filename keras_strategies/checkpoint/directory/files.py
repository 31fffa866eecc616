"""The files of a checkpoint: found without following links, and hashed."""

import contextlib
import errno
import hashlib
import io
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint,
    damaged,
)
from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    find_steps,
    kind_of,
    step_of,
)
from keras_strategies.cluster.untrusted import load_json

NO_LINKS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
"""With what files are opened: no link is followed, and no pipe waited for."""

_NOT_KNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
_MAX_STEPS = 8
_GONE = "it was deleted while it was read"


def find_files(path: pathlib.Path) -> dict[str, int]:
    """Sizes of a checkpoint's files but its manifest, by name.

    Args:
      path: The checkpoint's folder.

    Returns:
      Sizes in bytes by names relative to `path`, with `/`.

    Raises:
      DamagedCheckpoint: there is a link, or something that is neither file
        nor folder; the text names it.
    """
    check_folder(path)
    sizes: dict[str, int] = {}
    with reported(path):
        for name, status in _walk(path):
            if not stat.S_ISREG(status.st_mode):
                fault = f"it is a {kind_of(status)}, which no checkpoint holds"
                raise damaged(path, name, fault)
            if name != MANIFEST:
                sizes[name] = status.st_size
    return sizes


def check_folder(path: pathlib.Path) -> None:
    """Raises unless a checkpoint's folder is a folder, and no link to one.

    Raises:
      DamagedCheckpoint: it is something else, or is not there.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_there(path) from None
    if not stat.S_ISDIR(status.st_mode):
        raise damaged(path, None, f"it is a {kind_of(status)}, not a folder")


@contextlib.contextmanager
def reported(path: pathlib.Path, name: str | None = None) -> Iterator[None]:
    """Says of errors of reading which checkpoint and file they are about.

    Args:
      path: The checkpoint's folder.
      name: The file, relative to it; None for the folder.

    Raises:
      DamagedCheckpoint: in place of an OSError.
    """
    try:
        yield
    except FileNotFoundError:
        fault = _GONE if not path.exists() else "it is missing"
        raise damaged(path, name, fault) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise damaged(path, name, "it is a symbolic link") from None
        text = error.strerror or type(error).__name__
        raise damaged(path, name, f"it cannot be read: {text}") from error


@contextlib.contextmanager
def open_file(path: pathlib.Path, name: str) -> Iterator[io.FileIO]:
    """Opens a file of a checkpoint, if it is one and no link to one.

    Raises:
      DamagedCheckpoint: it is missing, something else, or cannot be read.
    """
    with (
        reported(path, name),
        io.FileIO(os.open(path / name, NO_LINKS), "rb") as file,
    ):
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            fault = f"it is a {kind_of(status)}, not a file"
            raise damaged(path, name, fault)
        yield file


def load_object(
    path: pathlib.Path, name: str, max_bytes: int, what: str
) -> dict[str, Any]:
    """Returns what a checkpoint's file of JSON holds, of a bounded depth.

    Args:
      path: The checkpoint's folder.
      name: The file, relative to it.
      max_bytes: The longest that is read.
      what: What it must be, for the error: "document".

    Raises:
      DamagedCheckpoint: it is missing, cannot be read, or is something else.
    """
    with open_file(path, name) as file:
        text = file.read(max_bytes + 1) or b""
    try:
        content = load_json(text, max_characters=max_bytes, has_nan=True)
    except ValueError as error:
        raise damaged(path, name, f"it is no {what}: {error}") from None
    if not isinstance(content, dict):
        raise damaged(path, name, "it is no object of JSON")
    return content


def digest(path: pathlib.Path, name: str) -> str:
    """The sha256 of a checkpoint's file, in hexadecimal digits.

    Args:
      path: The checkpoint's folder.
      name: The file, relative to it.

    Raises:
      DamagedCheckpoint: it is missing, no file, or cannot be read.
    """
    with open_file(path, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(path: pathlib.Path) -> int:
    """The bytes of all files in a folder, or of a file; links are not followed.

    What goes while it is counted, or cannot be looked at, counts nothing.
    """
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size if stat.S_ISREG(status.st_mode) else 0
        with os.scandir(path) as entries:
            return sum(size_of(path / entry.name) for entry in entries)
    except (OSError, RecursionError):
        return 0


def flush(path: pathlib.Path) -> None:
    """Has the disk hold a file's bytes, or a folder's names.

    Raises:
      OSError: the disk failed, or is full.
    """
    try:
        descriptor = os.open(path, NO_LINKS)
    except PermissionError:  # Windows opens no folders.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems over a network know of no such thing.
        if error.errno not in _NOT_KNOWN:
            raise
    finally:
        os.close(descriptor)


def _not_there(path: pathlib.Path) -> DamagedCheckpoint:
    fault = "there is no such folder"
    step = step_of(path.name)
    if step is None:
        cure = "It may have been deleted since it was listed. Use another step."
        return damaged(path, None, fault, cure)
    steps = find_steps(path.parent)
    others = f"there {'are' if len(steps) > 1 else 'is'} {_listed(steps)}"
    return DamagedCheckpoint(
        f"There is no checkpoint of step {step} in {str(path.parent)!r}; "
        f"{others}.",
        path=path,
        fault=fault,
    )


def _listed(steps: list[int]) -> str:
    """Steps for a text; of many, the last ones."""
    if not steps:
        return "none"
    start = "..., " if len(steps) > _MAX_STEPS else ""
    return start + ", ".join(map(str, steps[-_MAX_STEPS:]))


def _walk(path: pathlib.Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yields all that is below a folder but folders; follows no link.

    In the same order every time, so that an error is the same, too.
    """
    folders = [""]
    for folder in folders:  # Grows: folders may be nested deeply.
        with os.scandir(path / folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)
            else:
                yield name, status
