"""Chooses the GPUs of this process if other processes share its host.

JAX gives a process all GPUs of its host, or one of them under SLURM and Open
MPI. Here, the processes on a host share its GPUs evenly. A process that is
alone on its host takes all of them. GPUs are numbered by their positions among
those that CUDA_VISIBLE_DEVICES makes visible to the process.
"""

import importlib.util
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_strategies.cluster.addresses import (
    parse_index,
    read_number,
    read_text,
    shorten,
)
from keras_strategies.cluster.resolvers.launchers import LAUNCHERS
from keras_strategies.cluster.resolvers.slurm_step import (
    SETTER,
    expand_tasks_per_node,
)
from keras_strategies.cluster.spec import TaskInfo

LOCAL_IDS = "JAX_LOCAL_DEVICE_IDS"
"""JAX's environment variable for the GPUs that a process takes."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
ON_NODE = "SLURM_GPUS_ON_NODE"
DEV = Path("/dev")
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""The modules of JAX's plugins for CUDA."""

_PLATFORMS = ("cuda", "gpu")
_DRIVER = ("nvidiactl", "dxg")
_MAX_GPUS = 1024
_MAX_CHARACTERS = 1 << 16
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
_SLURM_LOCAL = "SLURM_LOCALID"
_SLURM_NODE = "SLURM_NODEID"
_SLURM_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)
_UUID = re.compile(r"GPU-[0-9A-Fa-f-]{1,40}", re.ASCII)


def choose_gpus(
    task: TaskInfo,
    environ: Mapping[str, str],
    *,
    platforms: str | None,
    resolver: object = None,
    dev: Path = DEV,
) -> tuple[int, ...] | None:
    """Chooses the GPUs that this process takes.

    Args:
      task: This process's role in the job.
      environ: The environment variables of this process.
      platforms: The value of JAX_PLATFORMS, or of the option `jax_platforms`.
      resolver: The cluster's resolver. If it has a method `gpu_ids`, as
        `SlurmClusterResolver`, this method chooses.
      dev: The directory of device files; tests replace it.

    Returns:
      The positions of the GPUs among the visible ones; `()` for all of them.
      None if JAX does not use NVIDIA GPUs in this process.

    Raises:
      ValueError: if two processes on the host would share a GPU, or a variable
        is invalid.
    """
    if not uses_gpus(environ, platforms, dev):
        return None
    if environ.get(LOCAL_IDS):
        return parse_gpus(environ[LOCAL_IDS])
    ask: Any = getattr(resolver, "gpu_ids", None)
    if ask is not None and (asked := tuple(ask())):
        return tuple(parse_index(gpu, "A GPU of `gpu_ids`") for gpu in asked)
    visible = count_visible_gpus(environ, dev)
    if _is_bound_by_slurm(environ, visible):
        return tuple(range(visible or 0))
    index, count = _find_place(task, environ)
    if count == 1:
        return ()
    if visible == 1 and VISIBLE in environ:
        # Launchers and users' scripts often show each process one GPU.
        return (0,)
    return share_gpus(index, count, visible, environ)


def uses_gpus(
    environ: Mapping[str, str], platforms: str | None, dev: Path = DEV
) -> bool:
    """Returns whether JAX uses NVIDIA GPUs, without starting JAX's devices.

    If `platforms` is not set, JAX uses them if a plugin for CUDA is installed
    and the driver is loaded; `dev` is the directory of device files.
    """
    if platforms:
        return allows_gpus(platforms)
    has_driver = _count_devices(dev) or any(
        (dev / name).exists() for name in _DRIVER
    )
    has_plugin = any(importlib.util.find_spec(name) for name in PLUGINS)
    is_hidden = count_visible_gpus(environ, dev) == 0
    return bool(has_driver and has_plugin and not is_hidden)


def allows_gpus(platforms: str | None) -> bool:
    """Returns whether JAX_PLATFORMS is unset or begins with a GPU's name."""
    first = (platforms or "").split(",")[0].strip().lower()
    return not first or first in _PLATFORMS


def count_visible_gpus(
    environ: Mapping[str, str], dev: Path = DEV
) -> int | None:
    """Returns how many GPUs a process may use; None if unknown.

    These are the GPUs in CUDA_VISIBLE_DEVICES; if it is not set, those of the
    SLURM step or of the host. As in CUDA, the list ends at its first invalid
    entry, and of several instances of MIG only one is visible.
    """
    on_host = _count_devices(dev)
    if VISIBLE not in environ:
        if not environ.get(ON_NODE):
            return on_host
        # SLURM with `--gpu-bind=none` only limits what may be used.
        step_gpus = read_number(environ, ON_NODE, SETTER)
        return step_gpus if on_host is None else min(step_gpus, on_host)
    count = 0
    for entry in environ[VISIBLE][:_MAX_CHARACTERS].split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            return max(count, 1)
        is_index = bool(_INDEX.fullmatch(name))
        if is_index and on_host is not None and int(name) >= on_host:
            break
        if not is_index and not _UUID.fullmatch(name):
            break
        count += 1
    return min(count, _MAX_GPUS)


def share_gpus(
    index: int, count: int, visible: int | None, environ: Mapping[str, str]
) -> tuple[int, ...]:
    """Returns one process's part of the visible GPUs.

    Args:
      index: The process's index among the processes on its host.
      count: The number of processes on the host.
      visible: The number of visible GPUs; None if unknown, and then each
        process takes one.
      environ: The environment variables.

    Raises:
      ValueError: if there are fewer GPUs than processes.
    """
    if visible is None:
        return (index,)
    if visible < count:
        raise ValueError(
            "Processes on one host must not share a GPU. Received: "
            f"{describe_gpus(visible, environ)} for {count} processes on this "
            "host. Start fewer processes on the host, or make more GPUs "
            "visible. If each process sees a GPU that the others do not see "
            f"(in a container, for example), set {LOCAL_IDS}=0 in each."
        )
    each, left = divmod(visible, count)
    if left and not index:
        warnings.warn(
            f"{left} of {visible} GPUs of this host stay idle, because its "
            f"{count} processes take {each} each. To use all of them, start a "
            "number of processes that divides the number of GPUs.",
            stacklevel=2,
        )
    return tuple(range(index * each, (index + 1) * each))


def describe_gpus(visible: int, environ: Mapping[str, str]) -> str:
    """Returns the number of visible GPUs as text, such as "1 visible GPU"."""
    text = f"{visible} visible GPU{'s' * (visible != 1)}"
    if VISIBLE in environ:
        text += f" ({VISIBLE}={shorten(environ[VISIBLE])})"
    return text


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parses a list of GPUs, such as "0,1".

    Raises:
      ValueError: if the text is not a list of different numbers below 1024.
    """
    words = [word.strip() for word in text[:_MAX_CHARACTERS].split(",")]
    gpus = [int(word) for word in words if _INDEX.fullmatch(word)]
    is_bounded = len(gpus) == len(words) and max(gpus) < _MAX_GPUS
    if not is_bounded or len(set(gpus)) != len(gpus):
        raise ValueError(
            f"{LOCAL_IDS} must be a list of different GPUs, such as 0,1. "
            f"Received: {shorten(text)}. Set it to the positions of this "
            "process's GPUs among the visible ones, or unset it."
        )
    return tuple(gpus)


def _count_devices(dev: Path) -> int | None:
    """Returns how many GPUs have a device file; None if none has one."""
    names = [path.name for path in dev.glob("nvidia[0-9]*")]
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names) or None


def _is_bound_by_slurm(environ: Mapping[str, str], visible: int | None) -> bool:
    """Returns whether SLURM shows this task only a part of the step's GPUs."""
    if visible is None or VISIBLE not in environ or not environ.get(ON_NODE):
        return False
    return 0 < visible < read_number(environ, ON_NODE, SETTER)


def _find_place(task: TaskInfo, environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process's index on its host, and the processes there.

    The result is (0, 1) if nothing shows that there are others.
    """
    if task.process_id is None or task.num_processes == 1:
        return 0, 1
    if None not in task.addresses:
        hosts = [_find_host(str(address)) for address in task.addresses]
        here = hosts[task.process_id]
        return hosts[: task.process_id].count(here), hosts.count(here)
    total = str(task.num_processes)
    for launcher in LAUNCHERS:
        size, *local = launcher.counts.split() or [""]
        if local and environ.get(size) == total and environ.get(local[0]):
            setter = launcher.setter or launcher.name
            count = read_number(environ, local[1], setter, minimum=1)
            index = read_number(environ, local[0], setter, maximum=count - 1)
            return index, count
    if environ.get(_SLURM_TASKS) == total and environ.get(_SLURM_LOCAL):
        text = read_text(environ, _SLURM_PER_NODE, SETTER)
        counts = expand_tasks_per_node(text)
        last = len(counts) - 1
        count = counts[read_number(environ, _SLURM_NODE, SETTER, maximum=last)]
        index = read_number(environ, _SLURM_LOCAL, SETTER, maximum=count - 1)
        return index, count
    return 0, 1


def _find_host(address: str) -> str:
    host = address.rpartition(":")[0].lower()
    return _LOOPBACK[0] if host in _LOOPBACK else host
