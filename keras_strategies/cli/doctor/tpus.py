"""Checks which processes hold this machine's TPUs, without starting libtpu.

A TPU belongs to one process at a time: the first whose libtpu opens the chips'
device files and locks `/tmp/libtpu_lockfile`. This may be a TensorFlow with
support for TPUs. Linux shows both in `/proc`.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    fault,
    note,
    warning,
)
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.addresses import join_few
from keras_strategies.names import versions

LOCK = Path("/tmp/libtpu_lockfile")
"""The file that libtpu locks."""

_LIBRARIES = ("libtpu", "tensorflow-tpu")
_DEVICE = re.compile(r"accel[0-9]{1,4}|vfio/[0-9]{1,4}", re.ASCII)
# A lock that is held, not one that is waited for: process, device and inode.
_LOCK = re.compile(
    r"\d+: \w+ +\w+ +\w+ +(\d{1,10}) [0-9a-f]+:[0-9a-f]+:(\d{1,20}) ", re.ASCII
)
_TENSORFLOW = b"tensorflow"
_MAX_BYTES = 4 << 20
_MAX_PROCESSES = 1 << 16
_MAX_FILES = 1 << 14
_MOST_NAMES = 8
# Lets several processes compile with libtpu at the same time.
_MULTIPLE = "ALLOW_MULTIPLE_LIBTPU_LOAD"
_OF_TENSORFLOW = (
    " TensorFlow with support for TPUs takes them when it is imported. Start "
    "it with TPU_LOAD_LIBRARY=0, or install tensorflow-cpu instead."
)
# With these, the processes of a host take different chips.
_SHARING = (
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
)

_TENSORFLOW_TPU = note(
    "tensorflow-tpu is installed, so a script that imports TensorFlow may give "
    "the TPU to TensorFlow before JAX starts it.",
    "To train with JAX, install tensorflow-cpu instead.",
)


def check_tpus(
    environ: Mapping[str, str],
    *,
    version_of: Version = versions.installed_version,
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    lock: Path = LOCK,
) -> Part | None:
    """Checks whether another process holds this machine's TPUs.

    Args:
      environ: The environment variables.
      version_of: A function that returns the version of a package, or None if
        it is not installed.
      proc: The folder in which Linux describes processes.
      dev: The folder of device files.
      lock: The file that libtpu locks.

    Returns:
      A part of the report; None if no library for TPUs is installed, or if the
      machine has no chip and no process has locked the file.
    """
    if not any(map(version_of, _LIBRARIES)):
        return None
    devices = _list_devices(dev)
    if not devices and environ.get(_MULTIPLE):
        return None
    holders = _find_holders(proc, devices, lock)
    is_locked_up = lock.exists() and not os.access(lock, os.W_OK)
    if not devices and not holders and not is_locked_up:
        return None
    names = [_describe(proc, pid) for pid in sorted(holders)]
    rows = (
        ("TPU device files", join_few(devices) or "none"),
        (
            "held by",
            "\n".join(names[:_MOST_NAMES])
            or "no process that this user can see",
        ),
    )
    has_tpu = bool(devices)
    findings = list(_check_holders(proc, holders, environ, has_tpu=has_tpu))
    if devices and version_of("tensorflow-tpu"):
        findings.append(_TENSORFLOW_TPU)
    if is_locked_up and not holders:
        findings.append(_refuse_lock(lock))
    return Part(title="TPUs", rows=rows, findings=tuple(findings))


def _list_devices(dev: Path) -> list[str]:
    """Returns the device files of chips, by their complete paths."""
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]
    return sorted(
        str(path)
        for path in found
        if _DEVICE.fullmatch(str(path.relative_to(dev)))
    )


def _find_holders(proc: Path, devices: list[str], lock: Path) -> set[int]:
    """Returns the processes that have opened a chip or locked the file."""
    holders = _find_lockers(proc, lock)
    folders = (path for path in proc.glob("[0-9]*") if path.name.isdigit())
    for folder in itertools.islice(folders, _MAX_PROCESSES):
        # Only root sees the open files of other users' processes.
        with contextlib.suppress(OSError):
            files = itertools.islice((folder / "fd").iterdir(), _MAX_FILES)
            if any(_read_link(path) in devices for path in files):
                holders.add(int(folder.name))
    return holders - {os.getpid()}


def _find_lockers(proc: Path, lock: Path) -> set[int]:
    try:
        inode = str(lock.stat().st_ino)
    except OSError:
        return set()
    lines = _read(proc / "locks").decode(errors="replace").splitlines()
    found = filter(None, map(_LOCK.match, lines))
    # It is 0 for a process outside of this container.
    return {int(m[1]) for m in found if m[2] == inode and int(m[1])}


def _check_holders(
    proc: Path, holders: set[int], environ: Mapping[str, str], *, has_tpu: bool
) -> Iterator[Finding]:
    for pid in sorted(holders)[:_MOST_NAMES]:
        name = _describe(proc, pid)
        cure = f"Wait until it has ended, or end it: `kill {pid}`."
        if _has_tensorflow(proc, pid):
            cure += _OF_TENSORFLOW
        if not has_tpu:
            yield warning(
                f"{name} uses libtpu, so no other process can compile for "
                "TPUs.",
                f"{cure} On a machine without TPUs you can also set {_MULTIPLE}"
                "=1.",
            )
        elif any(environ.get(variable) for variable in _SHARING):
            yield warning(
                f"{name} holds a TPU. JAX can start only on other chips.",
                f"Check that {' or '.join(_SHARING)} gives your process other "
                f"chips. {cure}",
            )
        else:
            yield fault(
                f"{name} holds the TPU. JAX cannot start the TPU in another "
                "process.",
                cure,
            )


def _refuse_lock(lock: Path) -> Finding:
    return fault(
        f"The file {lock} belongs to another user, so libtpu does not start.",
        f"If no process uses the TPU (`sudo lsof -w {lock}`), remove it: `sudo "
        f"rm {lock}`.",
    )


def _describe(proc: Path, pid: int) -> str:
    """Returns the process's number and program, but not its arguments.

    The arguments may contain passwords.
    """
    name = _read(proc / str(pid) / "comm").decode(errors="replace").strip()
    parts = [name[:64]] if name else []
    parts += ["with TensorFlow"] * _has_tensorflow(proc, pid)
    return f"Process {pid}" + f" ({', '.join(parts)})" * bool(parts)


def _has_tensorflow(proc: Path, pid: int) -> bool:
    """Returns whether the process has loaded TensorFlow's libraries."""
    return _TENSORFLOW in _read(proc / str(pid) / "maps")


def _read(path: Path) -> bytes:
    """Returns a file of `/proc`, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
