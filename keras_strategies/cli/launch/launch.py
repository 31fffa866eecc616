"""The command `keras-strategies launch`: runs a cluster on this machine."""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from keras_strategies.cli.launch.local_job import JobEnd, print_line, run_job
from keras_strategies.cluster.addresses import find_free_ports, shorten
from keras_strategies.cluster.checks import check_number
from keras_strategies.cluster.exchange import job_secret
from keras_strategies.gpu.xla_flags import XLA_FLAGS, read_flags
from keras_strategies.job import compilation_cache
from keras_strategies.job.local_gpus import (
    DEV,
    LOCAL_IDS,
    ON_NODE,
    VISIBLE,
    count_visible_gpus,
    share_gpus,
    uses_gpus,
)

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_HOST = "127.0.0.1"
_WRONG_ARGUMENTS = 2
_MAX_PROCESSES = 4096
_WAIT_S = 1.0


def launch(
    command: Sequence[str],
    *,
    is_module: bool = False,
    num_processes: int = 2,
    devices_per_process: int | None = None,
    platform: str = "cpu",
    has_evaluator: bool = False,
    max_restarts: int = 0,
) -> int:
    """Runs a script in several processes of one cluster, and waits for them.

    It must be called in the main thread, because it handles signals until it
    returns.

    Args:
      command: The path of a script or the name of a module, followed by its
        arguments.
      is_module: Whether the command is a module.
      num_processes: The number of processes in the cluster.
      devices_per_process: The number of virtual CPU devices of each process;
        None for one.
      platform: The value of JAX_PLATFORMS in the processes.
      has_evaluator: Whether to start one more process, an evaluator outside
        the cluster. The first process of the cluster is then a "chief".
      max_restarts: How often to start the job again after a process has
        failed.

    Returns:
      The exit code: 0 on success, 130 after Ctrl-C, 2 for invalid arguments.
      If a process failed, the exit code of the first process that failed, or
      128 + n if signal n killed that process.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    numbers = num_processes, devices_per_process
    try:
        _check_arguments(command, *numbers, platform, max_restarts)
        check_gpus(os.environ, platform, num_processes + has_evaluator)
        read_flags(os.environ)
    except ValueError as error:
        print(f"keras-strategies launch: {error}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    words = [sys.executable, "-u", *(["-m"] if is_module else []), *command]
    # A secret that is generated for this job lets the processes authenticate
    # each other.
    environ = {job_secret.VARIABLE: job_secret.make()} | os.environ
    names = make_task_names(num_processes, has_evaluator=has_evaluator)

    def run() -> JobEnd:
        settings: dict[str, str] = {}
        if max_restarts:  # The process that saves checkpoints warns.
            settings = compilation_cache.make_settings(environ, warns=False)
        environments = make_environments(
            environ | settings,
            names,
            [f"{_HOST}:{port}" for port in find_free_ports(num_processes)],
            num_devices=devices_per_process or 1,
            platform=platform,
        )
        if has_evaluator:
            split_gpus(environments, platform)
        return run_job(words, environments, names)

    return run_with_restarts(run, max_restarts=max_restarts)


def run_with_restarts(run: Callable[[], JobEnd], *, max_restarts: int) -> int:
    """Runs a job, and starts it again if it fails.

    Args:
      run: A function that runs the job once.
      max_restarts: The largest number of restarts.

    Returns:
      The exit code of the job's last run.
    """
    for number in range(1, max_restarts + 1):
        end = run()
        if end.is_final:
            break
        restart = f"restart {number} of {max_restarts} in {_WAIT_S:.0f} s"
        print_line(f"{end.text}; {restart}.")
        time.sleep(_WAIT_S)
    else:
        end = run()
    if end.text:
        print_line(f"{end.text}; the job has ended.")
    return end.code


def _check_arguments(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int | None,
    platform: str,
    max_restarts: int,
) -> None:
    """Raises ValueError for arguments that no job can have."""
    if os.name != "posix":
        raise ValueError(
            "this command runs only on Linux and macOS. On this system, start "
            "each process yourself."
        )
    name, fix = "--processes", "Pass, for example, --processes 2."
    check_number(name, num_processes, fix, minimum=1, maximum=_MAX_PROCESSES)
    name, fix = "--devices-per-process", "Omit it for one device per process."
    check_number(name, devices_per_process, fix, minimum=1)
    name, fix = "--max-restarts", "Pass, for example, --max-restarts 5."
    check_number(name, max_restarts, fix, minimum=0)
    if devices_per_process is not None and platform != "cpu":
        raise ValueError(
            "--devices-per-process can only be used on the CPU. "
            f"Received: --platform {platform}. Omit one of the two options."
        )
    if not command:
        raise ValueError(
            "a script or a module is missing. Specify what the processes run, "
            "for example `keras-strategies launch --processes 2 train.py`."
        )


def make_task_names(num_processes: int, *, has_evaluator: bool) -> list[str]:
    """Returns the tasks, as in TensorFlow: the prefixes for output lines."""
    workers = [f"worker {i}" for i in range(num_processes - has_evaluator)]
    return ["chief", *workers, "evaluator"] if has_evaluator else workers


def make_environments(
    environ: Mapping[str, str],
    names: Sequence[str],
    addresses: Sequence[str],
    *,
    num_devices: int,
    platform: str,
) -> list[dict[str, str]]:
    """Creates the environment variables of all processes.

    Args:
      environ: The environment variables of the launcher.
      names: The tasks, in the order of the processes' numbers.
      addresses: The `host:port` of each process of the cluster. An evaluator,
        which is last, has none.
      num_devices: The number of virtual devices; used only on the CPU.
      platform: The value of JAX_PLATFORMS.
    """
    changed = {
        "JAX_PLATFORMS": platform,
        "KERAS_BACKEND": "jax",
        "PYTHONUNBUFFERED": "1",
    }
    if platform == "cpu":
        flags = read_flags(environ).split()
        flags = [f for f in flags if not f.startswith(f"{_DEVICE_COUNT}=")]
        count = f"{_DEVICE_COUNT}={num_devices}"
        changed[XLA_FLAGS] = " ".join([*flags, count])
    cluster: dict[str, list[str]] = {}
    for name, address in zip(names, addresses, strict=False):
        cluster.setdefault(name.split()[0], []).append(address)
    environments = []
    if VISIBLE in environ:
        # Not SLURM has chosen these GPUs for each of the processes.
        environ = {k: v for k, v in environ.items() if k != ON_NODE}
    for name in names:
        kind, _, index = name.partition(" ")
        task = {"type": kind, "index": int(index or 0)}
        text = json.dumps({"cluster": cluster, "task": task})
        environments.append({**environ, **changed, "TF_CONFIG": text})
    return environments


_JAX_PLATFORMS = "JAX_PLATFORMS"


def check_gpus(
    environ: Mapping[str, str],
    platform: str,
    num_processes: int,
    dev: pathlib.Path = DEV,
) -> None:
    """Raises ValueError if the processes cannot use GPUs.

    Args:
      environ: The environment variables of the launcher.
      platform: The value of `--platform`.
      num_processes: The number of processes, with the evaluator.
      dev: The directory of device files; tests replace it.
    """
    if not uses_gpus(environ, platform, dev):
        return
    platforms = environ.get(_JAX_PLATFORMS, "").lower()
    has_gpus = not platforms or {"cuda", "gpu"} & set(platforms.split(","))
    if not has_gpus or count_visible_gpus(environ, dev) == 0:
        name = VISIBLE if has_gpus else _JAX_PLATFORMS
        value = environ.get(VISIBLE, "") if has_gpus else platforms
        raise ValueError(
            f"--platform {platform} needs GPUs, but {name}={shorten(value)} "
            f"hides them. Unset {name}, or omit --platform."
        )
    if num_processes > 1 and environ.get(LOCAL_IDS):
        raise ValueError(
            f"{LOCAL_IDS} must be unset, because it would give all processes "
            f"the same GPUs. Received: {shorten(environ[LOCAL_IDS])}. Set "
            f"{VISIBLE} instead."
        )
    if num_processes > 1:
        visible = count_visible_gpus(environ, dev)
        share_gpus(1, num_processes, visible, environ)


def split_gpus(
    environments: Sequence[dict[str, str]],
    platform: str,
    dev: pathlib.Path = DEV,
) -> None:
    """Hides the evaluator's GPUs from the cluster, and the others from it.

    The processes of the cluster share their GPUs when they join it, and still
    see all of them, because NCCL connects those that see each other.

    Args:
      environments: The environment variables of each process, which change. The
        last process is the evaluator.
      platform: The value of `--platform`.
      dev: The directory of device files; tests replace it.
    """
    environ, count = environments[0], len(environments)
    if not uses_gpus(environ, platform, dev):
        return
    visible = count_visible_gpus(environ, dev) or count
    names = list(map(str, range(visible)))
    if VISIBLE in environ:
        names = environ[VISIBLE].split(",")[:visible]
    first = visible - visible // count
    for environ in environments:
        environ[VISIBLE] = ",".join(names[:first])
        environ.pop(ON_NODE, None)
    environments[-1][VISIBLE] = ",".join(names[first:])
