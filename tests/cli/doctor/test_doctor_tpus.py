"""What `keras-strategies doctor` says of TPUs that another process holds."""

import contextlib
import os
import re
import subprocess
import sys

import pytest

from keras_strategies.cli.doctor.findings import Level
from keras_strategies.cli.doctor.tpus import check_tpus

pytestmark = pytest.mark.quick

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
LIBTPU = {"libtpu": "0.0.40"}


class Host:
    """A host whose processes and devices are files of a directory."""

    def __init__(self, directory):
        self.proc, self.dev = directory / "proc", directory / "dev"
        self.lock = directory / "lock"
        self.proc.mkdir()
        (self.dev / "vfio").mkdir(parents=True)

    def add_chips(self, *names):
        for name in names:
            (self.dev / name).touch()

    def add_process(self, pid, comm, *opened):
        directory = self.proc / str(pid)
        (directory / "fd").mkdir(parents=True)
        for number, path in enumerate(opened):
            (directory / "fd" / str(number)).symlink_to(path)
        (directory / "comm").write_text(comm + "\n")

    def check(self, installed=LIBTPU):
        return check_tpus(
            get_version=installed.get,
            proc=self.proc,
            dev=self.dev,
            lock=self.lock,
        )


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_machines_without_tpus_have_no_part(host):
    assert host.check() is None
    host.add_chips("accel0")
    assert host.check(installed={}) is None


def test_a_free_tpu_has_no_findings(host):
    host.add_chips("accel0", "accel1", "accelerometer", "vfio/vfio")
    host.add_process(7, "bash", "/dev/null")
    host.lock.touch()
    part = host.check()
    assert part.findings == ()
    rows = dict(part.rows)
    assert rows["TPU device files"].split(", ") == [
        str(host.dev / "accel0"),
        str(host.dev / "accel1"),
    ]
    assert rows["held by"].startswith("no process")


@pytest.mark.parametrize("chip", ["accel0", "vfio/12"])
def test_the_process_that_holds_the_tpu_is_named(host, chip):
    host.add_chips(chip)
    host.add_process(41, "python3", host.dev / chip)
    host.add_process(42, "bash", "/dev/null")
    part = host.check(installed={"tensorflow-tpu": "2.19.1"})
    assert dict(part.rows)["held by"] == "Process 41 (python3)"
    (finding,) = part.findings
    assert finding.level is Level.PROBLEM
    assert "Process 41 (python3) holds the TPU" in finding.text
    assert "`kill 41`" in finding.fix
    assert "TPU_LOAD_LIBRARY=0" in finding.fix


def test_the_holder_of_the_lock_is_named(host):
    host.lock.touch()
    host.add_process(5, "train", host.lock)
    host.add_process(os.getpid(), "doctor", host.lock)
    assert host.check() is None
    host.add_chips("accel0")
    part = host.check()
    assert dict(part.rows)["held by"] == "Process 5 (train)"
    (finding,) = part.findings
    assert finding.level is Level.PROBLEM


def test_a_file_of_another_user_is_named(host, monkeypatch):
    host.add_chips("accel0")
    host.lock.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    (finding,) = host.check().findings
    assert f"sudo rm {host.lock}" in finding.fix


def test_files_that_are_no_text_and_too_many(host):
    host.add_chips("accel0")
    for pid in range(1, 20):
        host.add_process(pid, "\x1b[31m" * 50, host.dev / "accel0")
    (host.proc / "self").mkdir()
    (host.proc / "locks").write_bytes(b"\xff\x00" * 1000)
    host.lock.touch()
    part = host.check()
    assert len(part.findings) == 8
    assert "\x1b" not in repr(part)
    assert all(len(f.text) < 700 for f in part.findings)


def test_another_users_process_that_holds_the_lock_is_named(host):
    host.add_chips("accel0")
    host.lock.touch()
    inode = host.lock.stat().st_ino
    host.add_process(5, "train")
    host.add_process(6, "waits")
    (host.proc / "5" / "fd").rmdir()  # Its open files cannot be read.
    (host.proc / "locks").write_text(
        "1: FLOCK  ADVISORY  WRITE 9 08:01:1 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 5 08:01:{inode} 0 EOF\n"
        f"2: -> POSIX  ADVISORY  WRITE 6 08:01:{inode} 0 EOF\n"
        f"3: POSIX  ADVISORY  WRITE 0 08:01:{inode} 0 EOF\n"
    )
    part = host.check()
    assert dict(part.rows)["held by"] == "Process 5 (train)"
    (finding,) = part.findings
    assert "`kill 5`" in finding.fix


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_real_process_that_has_locked_the_file(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    (tmp_path / "accel0").touch()
    words = [sys.executable, "-c", HOLDER, lock]
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        child = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        stack.callback(child.communicate)
        assert child.stdout.readline() == "locked\n"
        options = {"get_version": LIBTPU.get, "dev": tmp_path, "lock": lock}
        (finding,) = check_tpus(**options).findings
    text = rf"Process {child.pid} \(.+\) holds the TPU"
    assert re.match(text, finding.text)
    assert f"`kill {child.pid}`" in finding.fix
    assert not check_tpus(**options).findings
