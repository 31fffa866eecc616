"""The lock that allows only one process to write to a checkpoint directory."""

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

from keras_strategies.checkpoint.directory.files import NO_LINKS, quote_name
from keras_strategies.checkpoint.directory.names import (
    describe_kind,
    make_directory,
)
from keras_strategies.cluster.untrusted import load_json

try:
    import fcntl
except ImportError:  # Windows.
    fcntl = None

LOCK = ".lock"
"""The name of the lock's file in the directory of checkpoints."""

_logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_MAX_PROCESSES = 2**32
# The latest valid time, in seconds since 1970: Python's dates end in 9999.
_LAST_TIME = 2.0**37
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writer:
    """The process that writes to a directory, as read from its lock file.

    Attributes:
      host: The machine's name; "" if unknown.
      process_id: The process's id on that machine; None if unknown.
      since: The time at which the process locked the directory, in seconds
        since 1970 (UTC); None if unknown.
    """

    host: str = ""
    process_id: int | None = None
    since: float | None = None

    def __str__(self) -> str:
        number = "" if self.process_id is None else f" {self.process_id}"
        host = f" on {quote_name(self.host)}" if self.host else ""
        since = ""
        if self.since:
            began = datetime.datetime.fromtimestamp(self.since, datetime.UTC)
            since = f" since {began:%Y-%m-%d %H:%M:%S} UTC"
        return f"process{number}{host}{since}"


class DirectoryLock:
    """A lock that keeps other processes from writing to a directory.

    The kernel releases the lock when the process ends, even if the process is
    killed. The lock is advisory. It also excludes processes on other machines
    if the shared file system supports this (NFS does). In a cluster, only the
    chief acquires the lock.

    Both the lock file and the directory itself are locked, so that deleting the
    file does not release the lock. NFS cannot lock directories. On NFS, `renew`
    detects that the file was deleted.

        with DirectoryLock(directory):
            ...

    Args:
      directory: The directory of checkpoints, created if missing.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        # Descriptors of the directory and of the file. They are locked, or only
        # open if locks are not supported. None if this lock is not held.
        self._descriptor: int | None = None
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether the lock has been acquired and not yet released."""
        return self._file is not None

    def acquire(self, timeout_seconds: float = 5.0) -> None:
        """Acquires the lock, or raises an error that names its holder.

        If the file system does not support locks, logs a warning and locks
        nothing.

        Args:
          timeout_seconds: The maximum time to wait for the lock. Waiting helps
            if the holder has been killed and takes a moment to end.

        Raises:
          RuntimeError: if the lock is already held, by another process or by
            this process.
          OSError: if the lock file cannot be written, is a link or a pipe, or
            has a second name (a hard link).
        """
        if self.is_held:
            raise _make_taken_error(self._directory)
        self._lock(timeout_seconds)

    def renew(self) -> None:
        """Locks the file again if it was deleted or replaced in the meantime.

        Raises:
          RuntimeError: if another process has acquired the lock since then.
          OSError: if the lock file cannot be written.
        """
        if self._file is not None:
            if _is_at(self._file, self._directory / LOCK):
                return
            os.close(self._file)
            self._file = None
        self._lock(0.0)

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
        for descriptor in (self._file, self._descriptor):
            if descriptor is not None and fcntl is not None:
                with contextlib.suppress(OSError):
                    # Closing the descriptor may not be enough to unlock it: a
                    # child process that was not forked by Python may have a
                    # copy of it.
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
            while not self._lock_once():
                if time.monotonic() >= deadline:
                    raise _make_taken_error(self._directory)
                time.sleep(_POLL_SECONDS)
            assert self._file is not None
            _write_writer(self._file)
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def _lock_once(self) -> bool:
        """Tries once to lock the directory, then the file."""
        if self._descriptor is None and fcntl is not None:
            descriptor = os.open(self._directory, os.O_RDONLY)
            if _try_lock(descriptor, None) is False:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
        path = self._directory / LOCK
        self._file = _open(path, os.O_RDWR | os.O_CREAT)
        is_taken = _try_lock(self._file, self._directory) is False
        # The file may have been deleted after it was opened and before it was
        # locked. Other processes would then lock a new file.
        if not is_taken and _is_at(self._file, path):
            return True
        self._close()
        return False

    def _close(self) -> None:
        """Closes the descriptors without unlocking them.

        So a forked child that calls this does not release its parent's lock.
        """
        for descriptor in (self._file, self._descriptor):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._descriptor = None
        _held.discard(self)


def find_writer(directory: str | os.PathLike[str]) -> Writer | None:
    """Returns the process that holds a directory's lock, or None."""
    directory = pathlib.Path(directory)
    with contextlib.ExitStack() as stack:
        opened: list[int] = []
        for path, open_it in ((directory, os.open), (directory / LOCK, _open)):
            with contextlib.suppress(OSError):
                opened.append(open_it(path, os.O_RDONLY))
                stack.callback(os.close, opened[-1])
        if False in [_try_lock(d, None, is_shared=True) for d in opened]:
            return _read_writer(opened[-1])
    return None


_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _forget_all() -> None:
    # Otherwise a forked child that outlives its parent would hold the lock.
    for lock in list(_held):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _open(path: pathlib.Path, flags: int) -> int:
    descriptor = os.open(path, flags | NO_LINKS, 0o600)
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = f"is a {describe_kind(status)}"
    elif status.st_nlink > 1:
        # Writing to the file would truncate it under its other name, too.
        problem = f"is a hard link to a file with {status.st_nlink} names"
    if problem is None:
        return descriptor
    os.close(descriptor)
    raise OSError(
        errno.EINVAL,
        "The lock file of a directory must be a regular file with one name. "
        f"Received: {str(path)!r}, which {problem}. Delete this file",
    )


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether `path` is still the path of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _try_lock(
    descriptor: int, directory: pathlib.Path | None, *, is_shared: bool = False
) -> bool | None:
    """Tries to lock an open file or directory, without waiting.

    Args:
      descriptor: The descriptor of the file or directory.
      directory: The directory to report in a warning if locks are not
        supported; None for no warning.
      is_shared: Whether the lock allows other shared locks.

    Returns:
      Whether the lock was acquired; None if locks are not supported.
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
            "%s cannot be locked: %s. Make sure that no other run writes "
            "to this directory.",
            directory,
            reason,
        )
    return None


def _write_writer(descriptor: int) -> None:
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.time(),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(content).encode("ascii"))


def _read_writer(descriptor: int) -> Writer:
    """Reads the writer from a lock file, whose content is not trusted."""
    content = None
    with contextlib.suppress(OSError, ValueError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        text = os.read(descriptor, _MAX_BYTES)
        content = load_json(text, max_characters=_MAX_BYTES)
    entries = content if isinstance(content, dict) else {}
    host, number, since = map(entries.get, ("host", "pid", "since"))
    is_number = type(number) is int and 0 < number < _MAX_PROCESSES
    is_time = isinstance(since, float) and 0 < since < _LAST_TIME
    return Writer(
        host=host if isinstance(host, str) else "",
        process_id=number if is_number else None,
        since=since if is_time else None,
    )


def _make_taken_error(directory: pathlib.Path) -> RuntimeError:
    writer = find_writer(directory) or Writer()
    is_here = writer.host == socket.gethostname()
    fix = "Use another directory for this run, or end the other run."
    if is_here and writer.process_id == os.getpid():
        fix = (
            "That is this process. Use the manager that has locked the "
            "directory, or close it first (`manager.close()`)."
        )
    return RuntimeError(
        "Only one run at a time may write to a directory of checkpoints. "
        f"Received: {str(directory)!r}, which is locked by "
        f"{'another ' * (writer.process_id is None)}{writer}. {fix}"
    )
