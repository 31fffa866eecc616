"""One writer for a directory, also where the first is killed."""

import contextlib
import fcntl
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from keras_strategies.checkpoint.directory import lock as lock_module
from keras_strategies.checkpoint.directory.lock import (
    LOCK,
    DirectoryLock,
    find_writer,
)

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[3]
HOLD = """
import sys
from keras_strategies.checkpoint.directory.lock import DirectoryLock
DirectoryLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""

FORK = """
import os, signal, sys
from keras_strategies.checkpoint.directory.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
if os.fork():
    signal.pause()
print("child", lock.is_held, flush=True)
sys.stdin.read()
"""


def _holds(directory, number):
    """Whether the process with this number holds a directory's lock."""
    return (find_writer(directory) or "").startswith(f"process {number} on ")


@contextlib.contextmanager
def running(code, directory, says):
    """A process, from when it has said that."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == f"{says}\n"
        yield process
    finally:
        process.kill()
        # Its input ends, and so does a child's: then its output does.
        process.communicate(timeout=10)


@pytest.fixture
def other(tmp_path):
    """Another process that writes to the directory."""
    with running(HOLD, tmp_path, "held") as process:
        yield process


def test_second_process_is_told_who_writes(tmp_path, other):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(RuntimeError, match="Only one run at a time") as caught:
        lock.acquire(timeout_seconds=0)
    text = str(caught.value)
    assert f"process {other.pid} on {os.uname().nodename} since 20" in text
    assert str(tmp_path) in text
    assert "another directory" in text
    assert not lock.is_held
    assert _holds(tmp_path, other.pid)


def test_killed_writer_frees_the_directory(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    with DirectoryLock(tmp_path):
        assert _holds(tmp_path, os.getpid())


def test_a_deleted_file_lets_nobody_else_write(tmp_path, other):
    (tmp_path / LOCK).unlink()
    assert find_writer(tmp_path) is not None
    with pytest.raises(RuntimeError, match="locked by another process"):
        DirectoryLock(tmp_path).acquire(timeout_seconds=0)
    assert not (tmp_path / LOCK).exists()


def test_a_deleted_file_is_written_again(tmp_path):
    with DirectoryLock(tmp_path) as lock:
        (tmp_path / LOCK).unlink()
        lock.renew()
        number = (tmp_path / LOCK).stat().st_ino
        lock.renew()
        assert (tmp_path / LOCK).stat().st_ino == number
        assert _holds(tmp_path, os.getpid())
    assert find_writer(tmp_path) is None


def test_where_directories_cannot_be_locked_a_taken_file_is_found(
    tmp_path, monkeypatch
):
    class WithoutDirectories:
        """NFS's: it wants a descriptor that can be written to."""

        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB
        LOCK_SH, LOCK_UN = fcntl.LOCK_SH, fcntl.LOCK_UN

        @staticmethod
        def flock(descriptor, kind):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(9, "Bad file descriptor")
            fcntl.flock(descriptor, kind)

    monkeypatch.setattr(lock_module, "fcntl", WithoutDirectories)
    with DirectoryLock(tmp_path) as first:
        with pytest.raises(RuntimeError, match="Only one run at a time"):
            DirectoryLock(tmp_path).acquire(timeout_seconds=0)
        (tmp_path / LOCK).unlink()
        with DirectoryLock(tmp_path):
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match="Only one run at a time"
                ):
                    first.renew()
        first.renew()
        assert _holds(tmp_path, os.getpid())


def test_a_file_deleted_while_it_is_locked_is_made_again(tmp_path, monkeypatch):
    original, times = lock_module._open, []

    def open_once_late(path, flags):
        descriptor = original(path, flags)
        if not times:
            times.append(path.unlink())
        return descriptor

    monkeypatch.setattr(lock_module, "_open", open_once_late)
    with DirectoryLock(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_hard_link_is_refused_and_its_file_left_whole(tmp_path):
    text = "What somebody wrote. " * 20
    (tmp_path / "notes").write_text(text)
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    os.link(tmp_path / "notes", directory / LOCK)
    with pytest.raises(OSError, match="a regular file with one name"):
        DirectoryLock(directory).acquire(timeout_seconds=0)
    assert find_writer(directory) is None
    assert (tmp_path / "notes").read_text() == text


def test_second_object_of_a_process_is_refused(tmp_path):
    with DirectoryLock(tmp_path):
        with pytest.raises(RuntimeError, match="Use the manager"):
            DirectoryLock(tmp_path).acquire(timeout_seconds=0)
        assert _holds(tmp_path, os.getpid())


def test_an_object_that_holds_it_keeps_it_when_it_is_refused_again(tmp_path):
    lock = DirectoryLock(tmp_path)
    with lock:
        with pytest.raises(RuntimeError, match="Use the manager"):
            lock.acquire(timeout_seconds=0)
        assert lock.is_held
        assert find_writer(tmp_path)
    assert not lock.is_held
    assert find_writer(tmp_path) is None
    lock.release()
    with lock:
        assert lock.is_held


def test_directory_is_made_for_its_owner_alone(tmp_path):
    directory = tmp_path / "a" / "b"
    with DirectoryLock(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / LOCK).stat().st_mode) == 0o600


def test_forked_child_of_a_killed_writer_does_not_keep_it(tmp_path):
    with running(FORK, tmp_path, "child False") as process:
        process.kill()
        process.wait(timeout=10)
        # The child, still there, has a copy of the parent's files.
        with DirectoryLock(tmp_path):
            pass


def test_lock_waits_for_one_that_ends(tmp_path, other):
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        DirectoryLock(tmp_path).acquire(timeout_seconds=0.2)
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"\x1b[31m\n",
        # As versions before 0.12 wrote it.
        b'{"host": "h", "pid": 1, "since": 1e12}',
        b"[" * 4000,
    ],
)
def test_odd_content_still_tells_that_somebody_writes(tmp_path, content):
    with DirectoryLock(tmp_path):
        (tmp_path / LOCK).write_bytes(content)
        with pytest.raises(RuntimeError, match="which is locked by ") as caught:
            DirectoryLock(tmp_path).acquire(timeout_seconds=0)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_lock_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / LOCK
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"\.lock"):
        DirectoryLock(tmp_path).acquire(timeout_seconds=0)
    assert find_writer(tmp_path) is None
    assert not (tmp_path / "elsewhere").exists()


def test_nobody_writes_to_a_directory_that_is_not_there(tmp_path):
    assert find_writer(tmp_path / "none") is None


def test_without_locks_it_goes_on_with_a_warning(tmp_path, caplog):
    # What a file system without locks answers, without one at hand.
    class WithoutLocks:
        LOCK_EX = LOCK_SH = LOCK_NB = LOCK_UN = 0

        @staticmethod
        def flock(*_):
            raise OSError(95, "Operation not supported")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_module, "fcntl", WithoutLocks)
        with DirectoryLock(tmp_path) as lock:
            assert lock.is_held
            assert find_writer(tmp_path) is None
    assert "cannot be locked, because its file system" in caplog.text
