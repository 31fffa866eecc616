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
from keras_strategies.checkpoint.directory.names import make_directory
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
_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


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
        since = f" since {_time(self.since)}" if self.since else ""
        return f"process{number}{host}{since}"


class DirectoryLock:
    """Keeps other processes from writing to a directory of checkpoints.

    The kernel frees it when the process ends, however it ends. It holds for
    those that ask for it, on all machines that share the directory if their
    file system passes it on (NFS does). May be acquired several times, and is
    then to be released as often. Of a cluster's processes the chief alone
    acquires it.

        with DirectoryLock(directory):
            ...

    Args:
      directory: Where checkpoints are; made if there is none.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._directory = pathlib.Path(directory)
        self._descriptor: int | None = None
        self._depth = 0

    @property
    def is_held(self) -> bool:
        """Whether it is acquired, and not released as often."""
        return self._depth > 0

    def acquire(self, timeout_seconds: float = 5.0) -> None:
        """Acquires it, or says who has it.

        Where the file system knows no locks, a warning is logged and nothing
        is held.

        Args:
          timeout_seconds: How long to wait for it: a killed process may take
            a moment to be gone.

        Raises:
          RuntimeError: another process, or another object of this one, has it.
          OSError: the file cannot be written, or is a link or a pipe.
        """
        if not self._depth:
            self._lock(timeout_seconds)
        self._depth += 1

    def release(self) -> None:
        """Releases it; once for each time that it was acquired.

        Raises:
          RuntimeError: it is not held.
        """
        if not self._depth:
            raise RuntimeError(
                "A lock is released as often as it was acquired. Received: "
                f"one more for {str(self._directory)!r}. Leave out a release."
            )
        self._depth -= 1
        if not self._depth and self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                if fcntl is not None:
                    # A child that was not forked by Python has a copy.
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()

    def __enter__(self) -> "DirectoryLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, timeout_seconds: float) -> None:
        make_directory(self._directory)
        descriptor = _open(self._directory / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            deadline = time.monotonic() + timeout_seconds
            is_locked = _try_lock(descriptor, self._directory)
            while is_locked is False and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                is_locked = _try_lock(descriptor, self._directory)
            if is_locked is False:
                raise _taken(self._directory, _read(descriptor))
            _write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)

    def _close(self) -> None:
        """Lets go of the file. In a fork's child the parent still holds it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)

    def _forget(self) -> None:
        self._close()
        self._depth = 0


def writer_of(directory: str | os.PathLike[str]) -> Writer | None:
    """Who writes to a directory now, None for nobody, or if it is not known."""
    try:
        descriptor = _open(pathlib.Path(directory) / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        is_locked = _try_lock(descriptor, None, is_shared=True)
        return _read(descriptor) if is_locked is False else None
    finally:
        os.close(descriptor)


_held: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _forget_all() -> None:
    # Else a forked child that outlives its parent would keep the directory.
    for lock in list(_held):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _open(path: pathlib.Path, flags: int) -> int:
    descriptor = os.open(path, flags | _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(
            errno.EINVAL,
            f"A directory's lock is a file. Received: {str(path)!r}, which is "
            "something else. Delete it",
        )
    return descriptor


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


def _taken(directory: pathlib.Path, writer: Writer) -> RuntimeError:
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


def _time(seconds: float | None) -> str:
    moment = datetime.datetime.fromtimestamp(seconds or 0, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
