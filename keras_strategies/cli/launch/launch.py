"""The command `keras-strategies launch`: runs a cluster on this machine."""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from keras_strategies.cli.launch.local_job import JobEnd, run_job
from keras_strategies.cli.launch.restarts import run_with_restarts
from keras_strategies.cluster.addresses import find_free_ports, shorten
from keras_strategies.cluster.exchange import job_secret
from keras_strategies.gpu.xla_flags import XLA_FLAGS, read_flags
from keras_strategies.job import compilation_cache
from keras_strategies.job.local_gpus import (
    DEV,
    LOCAL_IDS,
    VISIBLE,
    count_visible_gpus,
    parse_gpus,
    share_gpus,
    uses_gpus,
)
from keras_strategies.job.progress_pipe import Progress

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_HOST = "127.0.0.1"
_WRONG_ARGUMENTS = 2
_MAX_PROCESSES = 4096


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
      max_restarts: How often to start the job again, from its last checkpoint,
        after a process has failed; see `RestartRules`.

    Returns:
      The exit code: 0 on success, 130 after Ctrl-C, 2 for invalid arguments.
      If a process failed, the exit code of the first process that failed, or
      128 + n if signal n killed that process.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    problem = (
        find_problem(command, num_processes, devices_per_process, platform)
        or find_gpu_problem(os.environ, platform, num_processes + has_evaluator)
        or _find_flags_problem(os.environ)
        or _find_restart_problem(max_restarts)
    )
    if problem:
        print(f"keras-strategies launch: {problem}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    words = [sys.executable, "-u", *(["-m"] if is_module else []), *command]
    # A secret that is generated for this job lets the processes authenticate
    # each other.
    environ = {job_secret.VARIABLE: job_secret.make()} | os.environ
    names = make_task_names(num_processes, has_evaluator=has_evaluator)

    def run(progress: Progress) -> JobEnd:
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
        environments = assign_gpus(
            environments, platform, has_evaluator=has_evaluator
        )
        return run_job(words, environments, names, progress)

    return run_with_restarts(run, max_restarts=max_restarts)


def find_problem(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int | None,
    platform: str,
) -> str:
    """Returns what is wrong with the arguments and what to do, or ""."""
    if os.name != "posix":
        return (
            "this command runs only on Linux and macOS. On this system, start "
            "each process yourself."
        )
    if not 1 <= num_processes <= _MAX_PROCESSES:
        return (
            f"--processes must be from 1 to {_MAX_PROCESSES}. Received: "
            f"{num_processes}. Pass, for example, --processes 2."
        )
    if devices_per_process is not None and devices_per_process < 1:
        return (
            "--devices-per-process must be 1 or more. Received: "
            f"{devices_per_process}. Omit it for one device per process."
        )
    if devices_per_process is not None and platform != "cpu":
        return (
            "--devices-per-process can only be used on the CPU. "
            f"Received: --platform {platform}. Omit one of the two options."
        )
    if not command:
        return (
            "a script or a module is missing. Specify what the processes run, "
            "for example `keras-strategies launch --processes 2 train.py`."
        )
    return ""


def _find_restart_problem(max_restarts: int) -> str:
    if max_restarts >= 0:
        return ""
    return (
        f"--max-restarts must be 0 or more. Received: {max_restarts}. Pass, "
        "for example, --max-restarts 5."
    )


def _find_flags_problem(environ: Mapping[str, str]) -> str:
    try:
        return read_flags(environ) and ""
    except ValueError as error:
        return str(error)


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
    for name in names:
        kind, _, index = name.partition(" ")
        task = {"type": kind, "index": int(index or 0)}
        text = json.dumps({"cluster": cluster, "task": task})
        environments.append({**environ, **changed, "TF_CONFIG": text})
    return environments


_JAX_PLATFORMS = "JAX_PLATFORMS"


def find_gpu_problem(
    environ: Mapping[str, str],
    platform: str,
    num_processes: int,
    dev: pathlib.Path = DEV,
) -> str:
    """Returns why the processes cannot use GPUs and what to do, or "".

    Args:
      environ: The environment variables of the launcher.
      platform: The value of `--platform`.
      num_processes: The number of processes, with the evaluator.
      dev: The directory of device files; tests replace it.
    """
    if not uses_gpus(environ, platform, dev):
        return ""
    platforms = environ.get(_JAX_PLATFORMS, "").lower()
    has_gpus = not platforms or {"cuda", "gpu"} & set(platforms.split(","))
    if not has_gpus or count_visible_gpus(environ, dev) == 0:
        name = VISIBLE if has_gpus else _JAX_PLATFORMS
        value = environ.get(VISIBLE, "") if has_gpus else platforms
        return (
            f"--platform {platform} needs GPUs, but {name}={shorten(value)} "
            f"hides them. Unset {name}, or omit --platform."
        )
    try:
        if num_processes > 1:
            _choose_gpus(environ, 1, num_processes, dev)
    except ValueError as error:
        return str(error)
    return ""


def assign_gpus(
    environments: Sequence[dict[str, str]],
    platform: str,
    *,
    has_evaluator: bool,
    dev: pathlib.Path = DEV,
) -> list[dict[str, str]]:
    """Adds variables for the GPUs of each process to its environment.

    Several processes take different GPUs. A process of the cluster still sees
    all GPUs, because NCCL connects those that see each other. The evaluator,
    which has no connections, sees its own only.

    Args:
      environments: The environment variables of each process.
      platform: The value of `--platform`.
      has_evaluator: Whether the last process is an evaluator.
      dev: The directory of device files; tests replace it.
    """
    count = len(environments)
    if count == 1 or not uses_gpus(environments[0], platform, dev):
        return list(environments)
    assigned = [
        environ | {LOCAL_IDS: ",".join(_choose_gpus(environ, i, count, dev))}
        for i, environ in enumerate(environments)
    ]
    if has_evaluator:
        gpus = assigned[-1].pop(LOCAL_IDS).split(",")
        visible = assigned[-1].get(VISIBLE)
        if visible is not None:
            names = visible.split(",")
            gpus = [names[int(gpu)].strip() for gpu in gpus]
        assigned[-1][VISIBLE] = ",".join(gpus)
    return assigned


def _choose_gpus(
    environ: Mapping[str, str], index: int, count: int, dev: pathlib.Path
) -> list[str]:
    """Returns the GPUs of one of `count` processes.

    If the user has chosen GPUs with JAX_LOCAL_DEVICE_IDS, these are shared.
    """
    if environ.get(LOCAL_IDS):
        pool = parse_gpus(environ[LOCAL_IDS])
        shared = share_gpus(index, count, len(pool), environ)
        return [str(pool[gpu]) for gpu in shared]
    visible = count_visible_gpus(environ, dev)
    return list(map(str, share_gpus(index, count, visible, environ)))
