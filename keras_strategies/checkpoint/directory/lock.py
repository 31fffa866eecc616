"""The lock that allows only one process to write to a checkpoint directory."""

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import socket
import stat
import time
import weakref

from keras_strategies.checkpoint.directory.files import NO_LINKS
from keras_strategies.checkpoint.directory.names import make_directory

LOCK = ".lock"
"""The name of the lock's file in the directory of checkpoints."""

_logger = logging.getLogger(__name__)

_MAX_BYTES = 200
_POLL_SECONDS = 0.05


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
        # open if locks are not supported. Empty if this lock is not held.
        self._descriptors: list[int] = []

    @property
    def is_held(self) -> bool:
        """Whether the lock has been acquired and not yet released."""
        return bool(self._descriptors)

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
        make_directory(self._directory)
        deadline = time.monotonic() + timeout_seconds
        while not self._try_once():
            if time.monotonic() >= deadline:
                raise _make_taken_error(self._directory)
            time.sleep(_POLL_SECONDS)

    def renew(self) -> None:
        """Locks the file again if it was deleted or replaced in the meantime.

        Raises:
          RuntimeError: if another process has acquired the lock since then.
          OSError: if the lock file cannot be written.
        """
        path = self._directory / LOCK
        if not self.is_held or not _is_at(self._descriptors[-1], path):
            self.release()
            self.acquire(0.0)

    def release(self) -> None:
        """Releases the lock, if it is held."""
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                # Closing the descriptor may not be enough to unlock it: a child
                # process that was not forked by Python may have a copy of it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._close()

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try_once(self) -> bool:
        """Tries once to lock the directory, then the file."""
        path = self._directory / LOCK
        is_locked = False
        try:
            self._descriptors = [os.open(self._directory, os.O_RDONLY)]
            if _try_lock(self._descriptors[0], fcntl.LOCK_EX) is False:
                return False
            self._descriptors.append(_open(path, os.O_RDWR | os.O_CREAT))
            answer = _try_lock(self._descriptors[1], fcntl.LOCK_EX)
            # The file may have been deleted after it was opened and before it
            # was locked. Other processes would then lock a new file.
            if answer is False or not _is_at(self._descriptors[1], path):
                return False
            if answer is None:
                _logger.warning(
                    "%s cannot be locked, because its file system does not "
                    "support locks. Make sure that no other run writes to it.",
                    self._directory,
                )
            _write_writer(self._descriptors[1])
            _held.add(self)
            is_locked = True
        finally:
            if not is_locked:
                self._close()
        return is_locked

    def _close(self) -> None:
        """Closes the descriptors without unlocking them.

        So a forked child that calls this does not release its parent's lock.
        """
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        _held.discard(self)


def find_writer(directory: str | os.PathLike[str]) -> str | None:
    """Returns a description of the process that holds a directory's lock.

    Returns None if the lock is not held. The text is read from the lock file,
    which is not trusted; unusual characters in it are escaped.
    """
    directory = pathlib.Path(directory)
    with contextlib.ExitStack() as stack:
        opened: list[int] = []
        for path, open_it in ((directory, os.open), (directory / LOCK, _open)):
            with contextlib.suppress(OSError):
                opened.append(open_it(path, os.O_RDONLY))
                stack.callback(os.close, opened[-1])
        if False in [_try_lock(d, fcntl.LOCK_SH) for d in opened]:
            return _read_writer(opened[-1])
    return None


_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _forget_all() -> None:
    # Otherwise a forked child that outlives its parent would hold the lock.
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_all)


def _open(path: pathlib.Path, flags: int) -> int:
    descriptor = os.open(path, flags | NO_LINKS, 0o600)
    status = os.fstat(descriptor)
    # Writing to a file with two names would truncate it under both of them.
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(
        errno.EINVAL,
        "The lock file of a directory must be a regular file with one name. "
        f"Received: {str(path)!r}. Delete this file",
    )


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether `path` is still the path of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _try_lock(descriptor: int, kind: int) -> bool | None:
    """Tries to lock an open file or directory, without waiting.

    Returns:
      Whether it was locked; None if locks are not supported.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write_writer(descriptor: int) -> None:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _read_writer(descriptor: int) -> str:
    text = b""
    with contextlib.suppress(OSError):
        text = os.pread(descriptor, _MAX_BYTES, 0)
    return ascii(text.decode("latin-1"))[1:-1] or "another process"


def _make_taken_error(directory: pathlib.Path) -> RuntimeError:
    fix = "Use another directory for this run, or end the other run."
    if directory.resolve() in [lock._directory.resolve() for lock in _held]:
        fix = (
            "That is this process. Use the manager that has locked the "
            "directory, or close it first (`manager.close()`)."
        )
    return RuntimeError(
        "Only one run at a time may write to a directory of checkpoints. "
        f"Received: {str(directory)!r}, which is locked by "
        f"{find_writer(directory) or 'another process'}. {fix}"
    )
