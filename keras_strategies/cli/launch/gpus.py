"""The GPUs of the processes that `keras-strategies launch` starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_strategies.cluster.addresses import shorten
from keras_strategies.job.local_gpus import (
    DEV,
    LOCAL_IDS,
    VISIBLE,
    count_visible_gpus,
    parse_gpus,
    share_gpus,
    uses_gpus,
)

_JAX_PLATFORMS = "JAX_PLATFORMS"


def find_gpu_problem(
    environ: Mapping[str, str],
    platform: str,
    num_processes: int,
    dev: Path = DEV,
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
    dev: Path = DEV,
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


def release_gpus(
    environments: Sequence[Mapping[str, str]], without: int
) -> dict[str, str]:
    """Returns the variable that leaves out the GPUs of one process, or {}.

    Args:
      environments: What `assign_gpus` returned.
      without: The number of the process.
    """
    kept = [
        environ[LOCAL_IDS]
        for index, environ in enumerate(environments)
        if index != without and LOCAL_IDS in environ
    ]
    return {LOCAL_IDS: ",".join(kept)} if kept else {}


def _choose_gpus(
    environ: Mapping[str, str], index: int, count: int, dev: Path
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
