"""Checks which processes hold this machine's TPUs, without starting libtpu.

A TPU belongs to one process at a time: the first whose libtpu opens the chips'
device files and locks `/tmp/libtpu_lockfile`. This may be a TensorFlow with
support for TPUs. Linux shows both in `/proc`; the locks of all users.
"""

import contextlib
import os
import re
from pathlib import Path

from keras_strategies.cli.doctor.findings import Part, problem
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.addresses import join_few
from keras_strategies.names import versions

LOCK = Path("/tmp/libtpu_lockfile")
"""The file that libtpu locks."""

_DEVICE = re.compile(r"accel[0-9]{1,4}|vfio/[0-9]{1,4}", re.ASCII)
_MAX_NAMES = 8
_FIX = (
    "Wait until it has ended, or end it (`kill {pid}`), unless the processes "
    "take different chips (TPU_VISIBLE_CHIPS). A TensorFlow with support for "
    "TPUs takes them when it is imported: start it with TPU_LOAD_LIBRARY=0, or "
    "install tensorflow-cpu instead."
)


def check_tpus(
    *,
    get_version: Version = versions.installed_version,
    proc: Path = Path("/proc"),
    dev: Path = Path("/dev"),
    lock: Path = LOCK,
) -> Part | None:
    """Checks whether another process holds this machine's TPUs.

    Args:
      get_version: A function that returns the version of a package, or None if
        it is not installed.
      proc: The directory in which Linux describes processes.
      dev: The directory of device files.
      lock: The file that libtpu locks.

    Returns:
      A part of the report; None if no library for TPUs is installed, or if the
      machine has no chip.
    """
    if not (get_version("libtpu") or get_version("tensorflow-tpu")):
        return None
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]
    devices = sorted(
        str(path)
        for path in found
        if _DEVICE.fullmatch(str(path.relative_to(dev)))
    )
    if not devices:
        return None
    holders = _find_holders(proc, {*devices, str(lock)}, lock)
    shown = [*holders.items()][:_MAX_NAMES]
    findings = [
        problem(
            f"{name} holds the TPU. JAX cannot start the TPU in another "
            "process.",
            _FIX.format(pid=pid),
        )
        for pid, name in shown
    ]
    if not holders and lock.exists() and not os.access(lock, os.W_OK):
        text = f"The file {lock} belongs to another user, so libtpu does not"
        fix = (
            f"If no process uses the TPU (`sudo lsof -w {lock}`), remove it: "
            f"`sudo rm {lock}`."
        )
        findings.append(problem(f"{text} start.", fix))
    names = "\n".join(name for _, name in shown)
    rows = (
        ("TPU device files", join_few(devices)),
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
    name = ""
    with contextlib.suppress(OSError):
        name = (directory / "comm").read_text(errors="replace").strip()[:64]
    return f"Process {directory.name}" + f" ({name})" * bool(name)
