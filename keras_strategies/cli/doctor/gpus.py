"""Checks of NVIDIA GPUs, without starting CUDA.

The driver describes itself in `/proc`, and packages have versions. Only the
stage "devices" of `probe` starts JAX's devices.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    fault,
    note,
    warning,
)
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job import local_gpus
from keras_strategies.names import versions

_DRIVER = Path("/proc/driver/nvidia/version")
_NUMBER = re.compile(r"\b([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b", re.ASCII)
_MAX_CHARACTERS = 4096
_SMI = "nvidia-smi"
_SMI_S = 10.0
_CUDAS = ("12", "13")
_EVALUATOR = note(
    "An evaluator takes memory of all visible GPUs when it starts, also of "
    "those on which others train.",
    "Set CUDA_VISIBLE_DEVICES to a GPU of its own, or JAX_PLATFORMS=cpu, in "
    "the evaluator.",
)


def check_gpus(
    environ: Mapping[str, str],
    info: TaskInfo | None = None,
    *,
    version_of: Version = versions.installed_version,
    driver: Path = _DRIVER,
    dev: Path = local_gpus.DEV,
) -> Part | None:
    """Checks the driver, JAX's plugin for CUDA, and this process's GPUs.

    Args:
      environ: The environment variables.
      info: This process's task, if it is in a cluster.
      version_of: A function that returns the version of a package, or None if
        it is not installed.
      driver: The file in which the driver writes its version.
      dev: The folder of device files.

    Returns:
      A part of the report; None if this machine has neither a driver nor a
      plugin.
    """
    driver_version = read_driver_version(driver)
    plugins = _list_versions("jax-cuda{}-plugin", version_of)
    if driver_version is None:
        if not plugins:
            return None
        text = f"{plugins}; this machine has no NVIDIA driver"
        return Part(title="GPUs", rows=(("CUDA plugin", text),))
    nccl = _list_versions("nvidia-nccl-cu{}", version_of)
    rows: list[Row] = [
        ("NVIDIA driver", driver_version),
        ("CUDA plugin", plugins or "not installed"),
        ("NCCL", nccl or "not installed as a package"),
    ]
    findings = list(_check_plugins(environ, version_of))
    visible = local_gpus.count_visible_gpus(environ, dev)
    if visible is not None:
        rows.append(("GPUs", local_gpus.describe_gpus(visible, environ)))
    more_rows, more = _check_share(environ, info, dev)
    return Part(
        title="GPUs",
        rows=(*rows, *more_rows),
        findings=(*findings, *more),
    )


def read_driver_version(driver: Path = _DRIVER) -> str | None:
    """Returns the version of NVIDIA's driver, or None without a driver.

    Args:
      driver: The file in which the driver writes its version. If it does not
        exist (as in WSL), nvidia-smi is run.
    """
    try:
        with driver.open("rb") as file:
            text = file.read(_MAX_CHARACTERS).decode(errors="replace")
    except OSError:
        text = _ask_nvidia_smi()
    found = _NUMBER.search(text)
    return found[1] if found else None


def _ask_nvidia_smi() -> str:
    if shutil.which(_SMI) is None:
        return ""
    words = [_SMI, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:_MAX_CHARACTERS].decode(errors="replace")


def _list_versions(pattern: str, version_of: Version) -> str:
    """Returns the installed packages, one for each version of CUDA."""
    names = [pattern.format(cuda) for cuda in _CUDAS]
    return ", ".join(
        f"{name} {version}" for name in names if (version := version_of(name))
    )


def _check_plugins(
    environ: Mapping[str, str], version_of: Version
) -> Iterator[Finding]:
    jaxlib = version_of("jaxlib") or ""
    names = [f"jax-cuda{cuda}-plugin" for cuda in _CUDAS]
    installed = {name: version_of(name) for name in names if version_of(name)}
    if not installed and local_gpus.allows_gpus(environ.get("JAX_PLATFORMS")):
        yield warning(
            "This machine has NVIDIA's driver, but JAX's plugin for CUDA is "
            "not installed, so JAX does not use GPUs.",
            "Install it (in a clone of the project: `pip install '.[cuda]'`), "
            "or set JAX_PLATFORMS=cpu.",
        )
    for name, version in installed.items():
        # JAX ignores a plugin that has another version than jaxlib.
        if versions.parse_version(version or "") != versions.parse_version(
            jaxlib
        ):
            yield fault(
                f"{name} {version} does not match jaxlib {jaxlib}, so JAX does "
                "not use it.",
                f"pip install '{name}=={jaxlib}'",
            )


def _check_share(
    environ: Mapping[str, str], info: TaskInfo | None, dev: Path
) -> tuple[list[Row], list[Finding]]:
    """Checks which GPUs this process takes in its cluster."""
    platforms = environ.get("JAX_PLATFORMS")
    if info is None or not local_gpus.uses_gpus(environ, platforms, dev):
        return [], []
    try:
        gpus = local_gpus.choose_gpus(
            info, environ, platforms=platforms, dev=dev
        )
    except (RuntimeError, ValueError) as error:
        *said, cure = str(error).split(". ", 2)
        return [], [fault(f"{'. '.join(said)}.", cure)]
    taken = ", ".join(map(str, gpus or ())) or "all visible GPUs"
    findings = []
    if not gpus and info.process_id is None:
        findings.append(_EVALUATOR)
    return [("GPUs of this process", taken)], findings
