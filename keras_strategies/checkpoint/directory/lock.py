"""One writer for a directory of checkpoints."""

import contextlib
import dataclasses
import datetime
import errno
import json
import logging
import os
import pathlib
import socket
import stat
import time
import weakref

from keras_strategies.checkpoint.directory.corruption import shown
from keras_strategies.checkpoint.directory.files import NO_LINKS
from keras_strategies.checkpoint.directory.names import (
    kind_of,
    make_directory,
)
from keras_strategies.cluster.untrusted import load_json

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

LOCK = ".lock"
"""The file, in the directory of checkpoints."""

_logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_MOST_PROCESSES = 2**32
# In seconds since 1970; dates end with the year 9999.
_LAST_TIME = 2.0**37
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """Who writes to a directory of checkpoints, as it said itself.

    Attributes:
      host: The machine's name; "" if it is not known.
      process_id: Its number there; None if it is not known.
      since: When it began, in seconds since 1970 (UTC); None if it is not
        known.
    """

    host: str = ""
    process_id: int | None = None
    since: float | None = None

    def __str__(self) -> str:
        number = "" if self.process_id is None else f" {self.process_id}"
        host = f" on {shown(self.host)}" if self.host else ""
        since = ""
        if self.since:
            began = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
            since = f" since {began:%Y-%m-%d %H:%M:%S} UTC"
        return f"process{number}{host}{since}"


class DirectoryLock:
    """Keeps other processes from writing to a directory of checkpoints.

    The kernel frees it when the process ends, however it ends. It holds for
    those that ask for it, on all machines that share the directory if their
    file system passes it on (NFS does). Of a cluster's processes the chief
    alone acquires it.

    The directory itself is locked beside the file, so that deleting the file
    frees nothing. NFS locks no directories: there `renew` finds that the file
    was deleted.

        with DirectoryLock(directory):
            ...

    Args:
      directory: Where checkpoints are; made if there is none.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        # Locked, or where nothing can be locked; None: not held.
        self._folder: int | None = None
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is acquired, and not released."""
        return self._file is not None

    def acquire(self, timeout_seconds: float = 5.0) -> None:
        """Acquires it, or says who has it.

        Where the file system knows no locks, a warning is logged and nothing
        is held.

        Args:
          timeout_seconds: How long to wait for it: a killed process may take
            a moment to be gone.

        Raises:
          RuntimeError: another process, or this one, has it.
          OSError: the file cannot be written, is a link or a pipe, or has a
            second name.
        """
        if self.is_held:
            raise _taken(self._directory)
        self._lock(timeout_seconds)

    def renew(self) -> None:
        """Locks the file again if it was deleted or replaced while held.

        Raises:
          RuntimeError: another process has it now.
          OSError: the file cannot be written.
        """
        if self._file is not None:
            if _is_at(self._file, self._directory / LOCK):
                return
            os.close(self._file)
            self._file = None
        self._lock(0.0)

    def release(self) -> None:
        """Releases it; does nothing if it is not held."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        for descriptor in (self._file, self._folder):
            if descriptor is not None and fcntl is not None:
                with contextlib.suppress(OSError):
                    # A child that was not forked by Python has a copy.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._close()

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, timeout_seconds: float) -> None:
        make_directory(self._directory)
        deadline = time.monotonic() + timeout_seconds
        try:
            while not self._is_locked():
                if time.monotonic() >= deadline:
                    raise _taken(self._directory)
                time.sleep(_POLL_SECONDS)
            assert self._file is not None
            _write(self._file)
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def _is_locked(self) -> bool:
        """Tries once to lock the directory, then the file."""
        if self._folder is None and fcntl is not None:
            folder = os.open(self._directory, os.O_RDONLY)
            if _try_lock(folder, None) is False:
                os.close(folder)
                return False
            self._folder = folder
        path = self._directory / LOCK
        self._file = _open(path, os.O_RDWR | os.O_CREAT)
        is_taken = _try_lock(self._file, self._directory) is False
        # It may have been deleted between its opening and its lock.
        if not is_taken and _is_at(self._file, path):
            return True
        self._close()
        return False

    def _close(self) -> None:
        """Closes the descriptors. After a fork the parent keeps its locks."""
        for descriptor in (self._file, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._folder = None
        _held.discard(self)


def writer_of(directory: str | os.PathLike[str]) -> Writer | None:
    """Returns who writes to a directory; None if no process is known to."""
    folder = pathlib.Path(directory)
    with contextlib.ExitStack() as stack:
        opened: list[int] = []
        for path, open_it in ((folder, os.open), (folder / LOCK, _open)):
            with contextlib.suppress(OSError):
                opened.append(open_it(path, os.O_RDONLY))
                stack.callback(os.close, opened[-1])
        if False in [_try_lock(d, None, is_shared=True) for d in opened]:
            return _read(opened[-1])
    return None


_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _forget_all() -> None:
    # Else a forked child that outlives its parent would keep the directory.
    for lock in list(_held):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _open(path: pathlib.Path, flags: int) -> int:
    descriptor = os.open(path, flags | NO_LINKS, 0o600)
    status = os.fstat(descriptor)
    fault = None
    if not stat.S_ISREG(status.st_mode):
        fault = f"is a {kind_of(status)}"
    elif status.st_nlink > 1:
        # Writing to it would cut the file that has the other name.
        fault = f"is a hard link: its file has {status.st_nlink} names"
    if fault is None:
        return descriptor
    os.close(descriptor)
    raise OSError(
        errno.EINVAL,
        "A directory's lock must be a file with one name. Received: "
        f"{str(path)!r}, which {fault}. Delete it",
    )


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _try_lock(
    descriptor: int, directory: pathlib.Path | None, *, is_shared: bool = False
) -> bool | None:
    """Whether it is locked now; None where there are no locks.

    Args:
      descriptor: The file.
      directory: Named in a warning where there are no locks; None for none.
      is_shared: Whether others may have it in this way, too.
    """
    reason = "this system has no flock"
    if fcntl is not None:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            reason = error.strerror or type(error).__name__
        else:
            return True
    if directory is not None:
        _logger.warning(
            "%s cannot be locked: %s. See to it that no other run writes "
            "there.",
            directory,
            reason,
        )
    return None


def _write(descriptor: int) -> None:
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.time(),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(content).encode("ascii"))


def _read(descriptor: int) -> Writer:
    """What a lock's file says; it may be anything."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        text = os.read(descriptor, _MAX_BYTES)
        content = load_json(text, max_characters=_MAX_BYTES)
    except (OSError, ValueError):
        return Writer()
    if not isinstance(content, dict):
        return Writer()
    host, number, since = (content.get(key) for key in ("host", "pid", "since"))
    is_number = type(number) is int and 0 < number < _MOST_PROCESSES
    is_time = isinstance(since, float) and 0 < since < _LAST_TIME
    return Writer(
        host=host if isinstance(host, str) else "",
        process_id=number if is_number else None,
        since=since if is_time else None,
    )


def _taken(directory: pathlib.Path) -> RuntimeError:
    writer = writer_of(directory) or Writer()
    is_here = writer.host == socket.gethostname()
    if is_here and writer.process_id == os.getpid():
        cure = (
            "That is this process: close what writes there first "
            "(`manager.close()`), or use it."
        )
    else:
        cure = "Give this run another directory, or end the other one."
    return RuntimeError(
        "One run at a time writes to a directory of checkpoints. "
        f"Received: {str(directory)!r}, where {writer} writes. {cure}"
    )
