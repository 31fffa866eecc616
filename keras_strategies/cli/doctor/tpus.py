"""Checks which processes hold this machine's TPUs, without starting libtpu.

A TPU belongs to one process at a time: the first whose libtpu opens the chips'
device files and locks `/tmp/libtpu_lockfile`. This may be a TensorFlow with
support for TPUs. Linux shows both in `/proc`; the locks of all users.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    note,
    problem,
    warning,
)
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.addresses import join_few
from keras_strategies.names import versions

LOCK = Path("/tmp/libtpu_lockfile")
"""The file that libtpu locks."""

_DEVICE = re.compile(r"accel[0-9]{1,4}|vfio/[0-9]{1,4}", re.ASCII)
_MAX_NAMES = 8
# Lets several processes compile with libtpu at the same time.
_MULTIPLE = "ALLOW_MULTIPLE_LIBTPU_LOAD"
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
    get_version: Version = versions.installed_version,
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    lock: Path = LOCK,
) -> Part | None:
    """Checks whether another process holds this machine's TPUs.

    Args:
      environ: The environment variables.
      get_version: A function that returns the version of a package, or None if
        it is not installed.
      proc: The directory in which Linux describes processes.
      dev: The directory of device files.
      lock: The file that libtpu locks.

    Returns:
      A part of the report; None if no library for TPUs is installed, or if the
      machine has no chip and no process has opened the lock's file.
    """
    if not (get_version("libtpu") or get_version("tensorflow-tpu")):
        return None
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]
    devices = sorted(
        str(path)
        for path in found
        if _DEVICE.fullmatch(str(path.relative_to(dev)))
    )
    if not devices and environ.get(_MULTIPLE):
        return None
    holders = _find_holders(proc, {*devices, str(lock)}, lock)
    is_locked_up = lock.exists() and not os.access(lock, os.W_OK)
    if not devices and not holders and not is_locked_up:
        return None
    names = "\n".join([*holders.values()][:_MAX_NAMES])
    findings = list(_check_holders(holders, environ, has_tpu=bool(devices)))
    if devices and get_version("tensorflow-tpu"):
        findings.append(_TENSORFLOW_TPU)
    if is_locked_up and not holders:
        text = f"The file {lock} belongs to another user, so libtpu does not"
        fix = (
            f"If no process uses the TPU (`sudo lsof -w {lock}`), remove it: "
            f"`sudo rm {lock}`."
        )
        findings.append(problem(f"{text} start.", fix))
    rows = (
        ("TPU device files", join_few(devices) or "none"),
        ("held by", names or "no process that this user can see"),
    )
    return Part(title="TPUs", rows=rows, findings=tuple(findings))


def _find_holders(proc: Path, paths: set[str], lock: Path) -> dict[int, str]:
    """Returns the other processes that hold a lock or have opened a file.

    Returns:
      A dict from process numbers to descriptions.
    """
    holders, lockers = {}, _find_lockers(proc, lock)
    directories = [path for path in proc.glob("[0-9]*") if path.name.isdigit()]
    for directory in sorted(directories, key=lambda path: int(path.name)):
        number, opened = int(directory.name), set()
        # Only root sees the open files of other users' processes. Files may
        # have been closed since.
        with contextlib.suppress(OSError):
            opened = {
                os.readlink(path) for path in (directory / "fd").iterdir()
            }
        if (number in lockers or opened & paths) and number != os.getpid():
            holders[number] = _describe(directory)
    return holders


def _find_lockers(proc: Path, lock: Path) -> set[int]:
    """Returns the processes that hold a lock, including other users'."""
    with contextlib.suppress(OSError):
        text = (proc / "locks").read_text(errors="replace")
        held = rf"^\d+: \w+ +\w+ +\w+ +(\d{{1,9}}) \S+:{lock.stat().st_ino} "
        return set(map(int, re.findall(held, text, re.ASCII | re.MULTILINE)))
    return set()


def _describe(directory: Path) -> str:
    """Returns a process's number and program, but not its arguments.

    The arguments may contain passwords.
    """
    parts = []
    with contextlib.suppress(OSError):
        parts += (
            (directory / "comm").read_text(errors="replace").split("\n")[:1]
        )
        if b"tensorflow" in (directory / "maps").read_bytes():
            parts.append("with TensorFlow")
    shown = ", ".join(part[:64] for part in parts if part)
    return f"Process {directory.name}" + f" ({shown})" * bool(shown)


def _check_holders(
    holders: Mapping[int, str], environ: Mapping[str, str], *, has_tpu: bool
) -> Iterator[Finding]:
    for pid, name in [*holders.items()][:_MAX_NAMES]:
        fix = f"Wait until it has ended, or end it: `kill {pid}`."
        if "with TensorFlow" in name:
            fix += (
                " TensorFlow with support for TPUs takes them when it is "
                "imported. Start it with TPU_LOAD_LIBRARY=0, or install "
                "tensorflow-cpu instead."
            )
        if not has_tpu:
            yield warning(
                f"{name} uses libtpu, so no other process can compile for "
                "TPUs.",
                f"{fix} On a machine without TPUs you can also set {_MULTIPLE}"
                "=1.",
            )
        elif any(environ.get(variable) for variable in _SHARING):
            yield warning(
                f"{name} holds a TPU. JAX can start only on other chips.",
                f"Check that {' or '.join(_SHARING)} gives your process other "
                f"chips. {fix}",
            )
        else:
            yield problem(
                f"{name} holds the TPU. JAX cannot start the TPU in another "
                "process.",
                fix,
            )
