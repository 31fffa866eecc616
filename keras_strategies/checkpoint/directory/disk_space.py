"""Early checks that a directory is writable and has enough space."""

import errno
import glob
import os
import pathlib
import shutil
import tempfile

from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    make_directory_error,
    parse_step,
)

_GB = 1e9


def check_free_space(directory: str | os.PathLike[str], num_bytes: int) -> None:
    """Checks that the disk has enough free space for a checkpoint.

    Args:
      directory: The directory of the checkpoint; it need not exist.
      num_bytes: The size of the checkpoint, in bytes.

    Raises:
      OSError: (ENOSPC) if there are fewer free bytes.
      NotADirectoryError: if the path, or a part of it, is not a directory.
    """
    free = shutil.disk_usage(_find_existing(pathlib.Path(directory))).free
    if num_bytes <= free:
        return
    raise OSError(
        errno.ENOSPC,
        f"A checkpoint does not fit on the disk of {os.fspath(directory)!r}. "
        f"It needs {num_bytes / _GB:.3f} GB; {free / _GB:.3f} GB are free. "
        "Delete files on this disk, keep fewer checkpoints, or use another "
        "directory",
    )


def make_save_error(
    directory: str | os.PathLike[str],
    step: int,
    good: int | None,
    error: Exception,
) -> OSError:
    """Makes the error for a save that failed, for example on a full disk.

    Args:
      directory: The directory of checkpoints.
      step: The step of the failed checkpoint.
      good: The step of the newest complete checkpoint; None if none exists.
      error: The error that made the save fail.
    """
    kept = (
        "There is no earlier complete checkpoint"
        if good is None
        else f"Earlier checkpoints are good; the newest one is step {good}"
    )
    number = getattr(error, "errno", None)
    received = str(error).strip().rstrip(".") or type(error).__name__
    new = OSError(
        errno.EIO if number is None else number,
        f"The checkpoint of step {step} could not be written to "
        f"{os.fspath(directory)!r}. {kept}. Received: {received}. Make sure "
        "that the disk works and has enough space, and start again",
    )
    new.__cause__ = error
    return new


def check_writable(directory: str | os.PathLike[str]) -> None:
    """Checks that checkpoints can be written to a directory.

    Args:
      directory: The directory; it need not exist, and is not created.

    Raises:
      NotADirectoryError: if the path, or a part of it, is not a directory.
      PermissionError: if this user may not write there.
      OSError: if the disk is read-only or full.
    """
    path = pathlib.Path(directory)
    existing = _find_existing(path)
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
            "The directory of checkpoints must be writable by this user. "
            f"Received: {str(path)!r}, but {str(existing)!r} is not writable: "
            f"{fault.strerror}. Use another directory, or change the "
            "permissions of this one",
        )


def check_name(directory: str | os.PathLike[str]) -> None:
    """Raises ValueError for a path that is unsuitable for a directory.

    A path is unsuitable if it is itself a checkpoint, or if it contains
    characters that are special in a glob pattern. Orbax 0.12 finds its files
    with a glob pattern that contains the path. If the path itself looks like a
    pattern, Orbax finds no files, and the checkpoint has no arrays
    (tests/contract/test_orbax_contract.py).

    Args:
      directory: The absolute path of a directory of checkpoints.
    """
    if glob.has_magic(os.fspath(directory)):
        raise ValueError(
            "The path of a directory of checkpoints must not contain '*', '?' "
            f"or '['. Received: {os.fspath(directory)!r}. Use another name, "
            "for example 'lr=0.1' instead of 'lr=[0.1]'."
        )
    path = pathlib.Path(directory)
    if parse_step(path.name) is not None and (path / MANIFEST).exists():
        raise ValueError(
            "Checkpoints must be saved in a directory of checkpoints. "
            f"Received: {os.fspath(directory)!r}, which is itself a "
            f"checkpoint. Pass its parent folder: {os.fspath(path.parent)!r}."
        )


def _find_existing(path: pathlib.Path) -> pathlib.Path:
    """Returns the path itself, or else its nearest parent that exists."""
    for folder in (path, *path.absolute().parents):
        if folder.is_dir():
            return folder
        if os.path.lexists(folder):
            raise make_directory_error(folder)
    return path


def _try_to_write(path: pathlib.Path) -> OSError | None:
    # A file mode does not show whether this user can really write to the disk,
    # so a temporary file is written.
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".probe-") as file:
            file.write(b"\0")
    except OSError as error:
        return error
    return None
