"""`keras-strategies launch`: a cluster of processes on this machine."""

import importlib.machinery
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from keras_strategies.cli.launch.local_job import run_job
from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.job.free_ports import find_free_ports

_FLAGS = "XLA_FLAGS"
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_HOST = "127.0.0.1"
# Two for output, one that ends when this process does.
_FILES_PER_PROCESS = 3
_OTHER_FILES = 64
_WRONG_ARGUMENTS = 2
_MOST_PROCESSES = 4096


def launch(
    command: Sequence[str],
    *,
    is_module: bool = False,
    num_processes: int = 2,
    devices_per_process: int | None = None,
    platform: str = "cpu",
    has_evaluator: bool = False,
) -> int:
    """Runs a script in several processes of one cluster, and waits for them.

    Called in the main thread: it handles the process's signals meanwhile.

    Args:
      command: The script, or the module's name, and its arguments.
      is_module: Whether it is a module.
      num_processes: How many processes.
      devices_per_process: Virtual CPU devices of each; None for one.
      platform: JAX_PLATFORMS of the processes.
      has_evaluator: Whether one more process is started, an evaluator outside
        of the cluster, whose first process is then a "chief".

    Returns:
      The exit code of the process that failed first (128 + n for signal n),
      else 0; 130 after Ctrl-C; 2 for wrong arguments.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    fault = find_fault(
        command, is_module, num_processes, devices_per_process, platform
    )
    if fault:
        print(f"keras-strategies launch: {fault}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    words = [sys.executable, "-u", *(["-m"] if is_module else []), *command]
    addresses = [f"{_HOST}:{port}" for port in find_free_ports(num_processes)]
    # Its processes know each other by a secret of this job alone.
    environ = {job_secret.VARIABLE: job_secret.make()} | os.environ
    environments = [
        make_environment(
            environ,
            addresses=addresses,
            index=index,
            num_devices=devices_per_process or 1,
            platform=platform,
            has_evaluator=has_evaluator,
        )
        for index in range(num_processes + has_evaluator)
    ]
    names = task_names(num_processes, has_evaluator=has_evaluator)
    return run_job(words, environments, names)


def find_fault(
    command: Sequence[str],
    is_module: bool,
    num_processes: int,
    devices_per_process: int | None,
    platform: str,
) -> str:
    """What is wrong with the arguments of `launch`, and the cure; else ""."""
    if os.name != "posix":
        return "runs on Linux and macOS. Start the processes by hand here."
    if not 1 <= num_processes <= _MOST_PROCESSES:
        return (
            f"--processes is from 1 to {_MOST_PROCESSES}. Received: "
            f"{num_processes}. Give, for example, --processes 2."
        )
    if devices_per_process is not None and devices_per_process < 1:
        return (
            "--devices-per-process is 1 or more. Received: "
            f"{devices_per_process}. Leave it out for one device each."
        )
    if devices_per_process is not None and platform != "cpu":
        return (
            "--devices-per-process makes virtual devices of the CPU. "
            f"Received: --platform {platform}. Leave one of the two out."
        )
    if not command:
        kind = "a module after -m" if is_module else "a script"
        return (
            f"{kind} is missing. Give what the processes run: "
            "`keras-strategies launch --processes 2 train.py`."
        )
    return _fault_of_command(command[0], is_module) or _fault_of_limits(
        num_processes
    )


def _fault_of_command(name: str, is_module: bool) -> str:
    if is_module:
        # Only its first part: to look further would import that.
        path = [os.getcwd(), *sys.path]
        root = name.split(".")[0]
        if root in sys.builtin_module_names or root in sys.modules:
            return ""
        if importlib.machinery.PathFinder.find_spec(root, path) is None:
            return (
                f"there is no module {name!r}. Install it, or go to its folder."
            )
        return ""
    path = pathlib.Path(name)
    if not path.exists():
        return (
            f"there is no file {name!r} in {os.getcwd()!r}. Give the path of "
            "a Python script, after all options."
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        return f"{name!r} is a folder. Give the path of a Python script."
    if not os.access(path, os.R_OK):
        return f"{name!r} cannot be read. Change its permissions."
    return ""


def _fault_of_limits(num_processes: int) -> str:
    import resource  # Not on Windows.

    needed = _FILES_PER_PROCESS * num_processes + _OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit == unlimited or needed <= limit:
        return ""
    if most == unlimited or needed <= most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
        return ""
    return (
        f"{num_processes} processes need {needed} open files. Received: a "
        f"limit of {most}. Raise it (`ulimit -n`), or start fewer processes."
    )


def task_names(num_processes: int, *, has_evaluator: bool) -> list[str]:
    """What the processes are called in front of their lines."""
    tasks = _tasks(num_processes, has_evaluator)
    return [f"{kind} {i}" if kind == "worker" else kind for kind, i in tasks]


def _tasks(num_processes: int, has_evaluator: bool) -> list[tuple[str, int]]:
    """The type and the index of each process's task, as tf has them."""
    if not has_evaluator:
        return [("worker", index) for index in range(num_processes)]
    workers = [("worker", index) for index in range(num_processes - 1)]
    return [("chief", 0), *workers, ("evaluator", 0)]


def make_environment(
    environ: Mapping[str, str],
    *,
    addresses: Sequence[str],
    index: int,
    num_devices: int,
    platform: str,
    has_evaluator: bool = False,
) -> dict[str, str]:
    """The variables of one process.

    Args:
      environ: Those of this process.
      addresses: `host:port` of all processes, by number.
      index: The number of the process.
      num_devices: Its virtual devices; used on the CPU.
      platform: What JAX runs on.
      has_evaluator: Whether there is one; it comes after all others.
    """
    tasks = _tasks(len(addresses), has_evaluator)
    cluster: dict[str, list[str]] = {}
    # The evaluator, which comes last, has no address.
    for (kind, _), address in zip(tasks, addresses, strict=False):
        cluster.setdefault(kind, []).append(address)
    kind, place = tasks[index]
    task = {"type": kind, "index": place}
    changed = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "JAX_PLATFORMS": platform,
        "KERAS_BACKEND": "jax",
        "PYTHONUNBUFFERED": "1",
    }
    if platform == "cpu":
        flags = environ.get(_FLAGS, "").split()
        flags = [f for f in flags if not f.startswith(f"{_DEVICE_COUNT}=")]
        changed[_FLAGS] = " ".join([*flags, f"{_DEVICE_COUNT}={num_devices}"])
    return dict(environ) | changed
