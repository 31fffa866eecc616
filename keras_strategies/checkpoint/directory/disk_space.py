"""A check that a directory can be written to, before it is needed."""

import errno
import glob
import os
import pathlib
import shutil
import tempfile

from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    not_a_directory,
    step_of,
)

_GB = 1e9


def check_free_space(directory: str | os.PathLike[str], num_bytes: int) -> None:
    """Raises if what is to be saved does not fit on the disk.

    Args:
      directory: Where it goes; it need not exist.
      num_bytes: How much is to be written.

    Raises:
      OSError: (ENOSPC) less is free.
      NotADirectoryError: there is something else in its place.
    """
    free = shutil.disk_usage(_existing(pathlib.Path(directory))).free
    if num_bytes <= free:
        return
    raise OSError(
        errno.ENOSPC,
        f"A checkpoint does not fit on the disk of {os.fspath(directory)!r}. "
        f"It needs {num_bytes / _GB:.3f} GB; free are {free / _GB:.3f} GB. "
        "Delete files there, keep fewer checkpoints, or give another "
        "directory",
    )


def not_written(
    directory: str | os.PathLike[str],
    step: int,
    good: int | None,
    error: Exception,
) -> OSError:
    """The error of a save that failed in the middle, as on a full disk.

    Args:
      directory: Where it was to go.
      step: Which one it was.
      good: The newest that is whole; None without any.
      error: What has happened.
    """
    kept = (
        "No checkpoint was complete before it"
        if good is None
        else f"Those before it are good, the newest is of step {good}"
    )
    number = getattr(error, "errno", None)
    received = str(error).strip().rstrip(".") or type(error).__name__
    new = OSError(
        errno.EIO if number is None else number,
        f"The checkpoint of step {step} could not be written to "
        f"{os.fspath(directory)!r}. {kept}. Received: {received}. See that "
        "there is space and that the disk answers, and start again",
    )
    new.__cause__ = error
    return new


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Raises unless checkpoints can be written to a directory.

    Args:
      directory: Where they go; it need not exist, and is not made.

    Raises:
      NotADirectoryError: it, or what it is to be in, is something else.
      PermissionError: this user may not write there.
      OSError: it is on a disk that is read-only, or full.
    """
    path = pathlib.Path(directory)
    existing = _existing(path)
    if existing != path:
        is_writable = os.access(existing, os.W_OK | os.X_OK)
        fault = None
        if not is_writable:
            fault = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    else:
        fault = _try_to_write(path)
    if fault is not None:
        raise OSError(
            fault.errno,
            "Checkpoints are written to a directory that this user may write "
            f"to. Received: {str(path)!r}, where {str(existing)!r} refuses it: "
            f"{fault.strerror}. Give another directory, or change its mode",
        )


def check_name(directory: str | os.PathLike[str]) -> None:
    """Raises ValueError for a checkpoint, or a name that is a pattern to Orbax.

    Orbax 0.12 looks for what it saved by a pattern and finds nothing then, so
    the checkpoint is without arrays: tests/contract/test_orbax_contract.py.

    Args:
      directory: An absolute path.
    """
    if glob.has_magic(os.fspath(directory)):
        raise ValueError(
            "The path of a directory of checkpoints has no '*', '?' or '['. "
            f"Received: {os.fspath(directory)!r}. Give another name, for "
            "example 'lr=0.1' instead of 'lr=[0.1]'."
        )
    path = pathlib.Path(directory)
    if step_of(path.name) is not None and (path / MANIFEST).exists():
        raise ValueError(
            "Checkpoints are saved in a directory. Received: "
            f"{os.fspath(directory)!r}, which is one checkpoint. Give the "
            f"directory that it is in: {os.fspath(path.parent)!r}."
        )


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The directory, or the nearest above it that exists."""
    for folder in (path, *path.absolute().parents):
        if folder.is_dir():
            return folder
        if os.path.lexists(folder):
            raise not_a_directory(folder)
    return path


def _try_to_write(path: pathlib.Path) -> OSError | None:
    # What a disk really allows: modes do not show it for every user.
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".probe-") as file:
            file.write(b"\0")
    except OSError as error:
        return error
    return None
