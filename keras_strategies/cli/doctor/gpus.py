"""Checks of NVIDIA GPUs, without starting CUDA.

The driver describes itself in `/proc`, and packages have versions. Only the
stage "devices" of `probe` starts JAX's devices.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    make_problem,
    problem,
    warning,
)
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job import local_gpus
from keras_strategies.names import versions

_DRIVER = Path("/proc/driver/nvidia/version")
_NUMBER = re.compile(r"\b([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})\b", re.ASCII)
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def check_gpus(
    environ: Mapping[str, str],
    info: TaskInfo | None = None,
    *,
    get_version: Version = versions.installed_version,
    driver: Path = _DRIVER,
    dev: Path = local_gpus.DEV,
) -> Part | None:
    """Checks the driver, JAX's plugin for CUDA, and this process's GPUs.

    Args:
      environ: The environment variables.
      info: This process's task, if it is in a cluster.
      get_version: A function that returns the version of a package, or None if
        it is not installed.
      driver: The file in which the driver writes its version.
      dev: The directory of device files.

    Returns:
      A part of the report; None if this machine has neither a driver nor a
      plugin.
    """
    driver_version = read_driver_version(driver)
    installed = {name: get_version(name) for name in (*_PLUGINS, *_NCCL)}
    plugins, nccl = (
        ", ".join(f"{n} {installed[n]}" for n in names if installed[n])
        for names in (_PLUGINS, _NCCL)
    )
    if driver_version is None:
        if not plugins:
            return None
        text = f"{plugins}; this machine has no NVIDIA driver"
        return Part(title="GPUs", rows=(("CUDA plugin", text),))
    rows: list[Row] = [
        ("NVIDIA driver", driver_version),
        ("CUDA plugin", plugins or "not installed"),
        ("NCCL", nccl or "not installed as a package"),
    ]
    visible = local_gpus.count_visible_gpus(environ, dev)
    if visible is not None:
        rows.append(("GPUs", local_gpus.describe_gpus(visible, environ)))
    findings = list(_check_plugins(environ, get_version))
    platforms = environ.get("JAX_PLATFORMS")
    if info is not None and local_gpus.uses_gpus(environ, platforms, dev):
        try:
            gpus = local_gpus.choose_gpus(
                info, environ, platforms=platforms, dev=dev
            )
        except (RuntimeError, ValueError) as error:
            findings.append(make_problem(error))
        else:
            shown = ", ".join(map(str, gpus or ())) or "all visible GPUs"
            rows.append(("GPUs of this process", shown))
    return Part(title="GPUs", rows=tuple(rows), findings=tuple(findings))


def read_driver_version(driver: Path = _DRIVER) -> str | None:
    """Returns the version of NVIDIA's driver, or None without a driver.

    Args:
      driver: The file in which the driver writes its version.
    """
    try:
        text = driver.read_text(errors="replace")
    except OSError:
        return None
    found = _NUMBER.search(text)
    return found[1] if found else None


def _check_plugins(
    environ: Mapping[str, str], get_version: Version
) -> Iterator[Finding]:
    jaxlib = get_version("jaxlib") or ""
    installed = {name: get_version(name) or "" for name in _PLUGINS}
    is_wanted = local_gpus.allows_gpus(environ.get("JAX_PLATFORMS"))
    if is_wanted and not any(installed.values()):
        yield warning(
            "This machine has NVIDIA's driver, but JAX's plugin for CUDA is "
            "not installed, so JAX does not use GPUs.",
            "Install it (in a clone of the project: `pip install '.[cuda]'`), "
            "or set JAX_PLATFORMS=cpu.",
        )
    parse = versions.parse_version
    for name, version in installed.items():
        # JAX ignores a plugin that has another version than jaxlib.
        if version and parse(version) != parse(jaxlib):
            yield problem(
                f"{name} {version} does not match jaxlib {jaxlib}, so JAX does "
                "not use it.",
                f"pip install '{name}=={jaxlib}'",
            )
