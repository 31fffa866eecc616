"""Checks installed packages and the variables that Keras and JAX read.

The checks depend only on the environment variables, a file that XLA_FLAGS
names, and a function that looks up the version of a package. They do not import
the packages.
"""

import importlib.util
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping

import keras_strategies
from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    make_problem,
    note,
    problem,
    warning,
)
from keras_strategies.cluster.checks import read_timeout
from keras_strategies.cluster.exchange.job_secret import VARIABLE, read_secret
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.gpu.xla_flags import read_flags
from keras_strategies.job import compilation_cache, mutual_tls
from keras_strategies.names import versions
from keras_strategies.names.versions import is_switched_on

MIN_PYTHON = (3, 11)
# Optional modules, the extras that install them, and what they are used for.
_EXTRAS = (
    ("tensorflow", "tensorflow", "datasets of tf.data"),
    ("grain", "grain", "datasets of grain"),
    ("torch", "torch", "datasets of torch"),
    ("libtpu", "tpu", "TPUs"),
    ("tensorboardX", "tensorboard", "TensorBoard"),
    ("sklearn", "examples", "the examples"),
)
_MAX_FLAGS = 1 << 16
DEVICE_COUNT = "--xla_force_host_platform_device_count="
_PLATFORMS = {"cpu", "cuda", "gpu", "rocm", "tpu", "METAL", "metal", "proxy"}
Version = Callable[[str], str | None]


def check_packages(
    get_version: Version = versions.installed_version,
    python: tuple[int, ...] = sys.version_info[:2],
) -> Part:
    """Checks the versions of packages, and which extras are installed.

    Args:
      get_version: A function that returns the version of a package, or None if
        it is not installed.
      python: The version of Python.
    """
    rows = [
        ("python", platform.python_version()),
        ("keras_strategies", keras_strategies.__version__),
    ]
    findings = []
    if python < MIN_PYTHON:
        old, minimum = map(versions.format_version, (python, MIN_PYTHON))
        fix = "Create a virtual environment with a newer Python."
        findings.append(problem(f"Python {old} is older than {minimum}.", fix))
    for package in versions.MINIMUM:
        version = get_version(package)
        rows.append((package, version or "not installed"))
        findings += _check_package(package, version)
    installed, missing = [], []
    for module, extra, purpose in _EXTRAS:
        if importlib.util.find_spec(module):
            installed.append(module)
        else:
            missing.append(f"{module} ({purpose}: extra '{extra}')")
    rows.append(("optional", ", ".join(installed) or "none"))
    if missing:
        rows.append(("not installed", "\n".join(missing)))
    return Part(title="Packages", rows=tuple(rows), findings=tuple(findings))


def _check_package(package: str, version: str | None) -> Iterator[Finding]:
    fix = f"pip install --upgrade '{versions.make_requirement(package)}'"
    minimum, below = versions.MINIMUM[package], versions.BELOW.get(package)
    number = versions.parse_version(version or "")
    if version is None:
        yield problem(f"{package} is not installed.", fix)
    elif number < minimum:
        yield problem(
            f"{package} {version} is older than "
            f"{versions.format_version(minimum)}, the oldest supported "
            "version.",
            fix,
        )
    elif below and number >= below:
        yield warning(
            f"{package} {version} is newer than the tested versions (see "
            "docs/versions.md).",
            fix,
        )


def check_variables(environ: Mapping[str, str], num_cores: int) -> Part:
    """Checks the environment variables that Keras and JAX read.

    Args:
      environ: The environment variables.
      num_cores: The number of CPU cores that this process may use.
    """
    flags = split_flags(environ.get("XLA_FLAGS", ""))
    rows: list[Row] = [
        (name, environ[name])
        for name in ("KERAS_BACKEND", "KERAS_NNX_ENABLED", "JAX_PLATFORMS")
        if environ.get(name)
    ]
    if flags:
        rows.append(("XLA_FLAGS", "\n".join(flags)))
    if environ.get(VARIABLE):
        rows.append((VARIABLE, "set (not shown)"))
    rows.append(("CPU cores", str(num_cores)))
    findings = (
        *_check_keras(environ),
        *_check_platforms(environ.get("JAX_PLATFORMS", "")),
        *_check_values(environ),
        *_check_virtual_devices(flags, num_cores),
        *_check_cache(environ),
    )
    return Part(title="Environment", rows=tuple(rows), findings=findings)


def check_tls(
    environ: Mapping[str, str],
    info: TaskInfo | None,
    *,
    get_version: Version = versions.installed_version,
) -> tuple[list[Row], list[Finding]]:
    """Checks mutual TLS as a job does before it starts JAX.

    Args:
      environ: The environment variables.
      info: This process's task, if it is in a cluster.
      get_version: A function that returns the version of a package, or None if
        it is not installed.

    Returns:
      The rows and the findings. There is no row if the process is the only
      one of its job and no variable for mutual TLS is set.
    """
    jax = versions.parse_version(get_version("jax") or "")
    try:
        is_on = mutual_tls.read_mutual_tls(
            environ, is_supported=jax >= mutual_tls.MIN_JAX
        )
    except ValueError as error:
        return [("mutual TLS", "faulty")], [make_problem(error)]
    is_alone = info is None or info.num_processes == 1
    shown = [] if is_alone and not is_on else ["on" if is_on else "off"]
    return [("mutual TLS", text) for text in shown], []


def split_flags(text: str) -> list[str]:
    """Splits the value of XLA_FLAGS into separate flags."""
    try:
        # The time that `shlex` needs is quadratic in the length of a word.
        return shlex.split(text) if len(text) < _MAX_FLAGS else text.split()
    except ValueError:
        return text.split()


def _check_values(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the errors that other modules raise for values of variables."""
    for read in (read_flags, read_secret, read_timeout):
        try:
            read(environ)
        except ValueError as error:
            yield make_problem(error)


def _check_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = compilation_cache.find_problem(environ)
    if found:
        yield warning(
            "Compiled programs are not cached, so a restarted job compiles "
            f"them again: {found}.",
            compilation_cache.FIX,
        )


def _check_keras(environ: Mapping[str, str]) -> Iterator[Finding]:
    backend = environ.get("KERAS_BACKEND", "jax")
    if backend != "jax":
        yield problem(
            f"KERAS_BACKEND is {backend!r}, so importing keras_strategies "
            "raises an error.",
            "Set KERAS_BACKEND=jax, or unset it.",
        )
    if is_switched_on(environ.get("KERAS_NNX_ENABLED", "")):
        yield problem(
            "KERAS_NNX_ENABLED is on, so importing keras_strategies raises an "
            "error.",
            "Unset it, because strategies need Keras variables, not NNX "
            "variables.",
        )


def _check_platforms(text: str) -> Iterator[Finding]:
    unknown = sorted(set(filter(None, text.split(","))) - _PLATFORMS)
    if unknown:
        yield note(
            f"JAX_PLATFORMS contains {', '.join(map(repr, unknown))}, which "
            "is not a built-in platform of JAX.",
            "Check the spelling, unless a plugin provides this platform.",
        )


def _check_virtual_devices(
    flags: list[str], num_cores: int
) -> Iterator[Finding]:
    counts = [flag for flag in flags if flag.startswith(DEVICE_COUNT)]
    for flag in counts[-1:]:  # If the flag is repeated, XLA uses the last one.
        count = flag.removeprefix(DEVICE_COUNT)
        if not (count.isascii() and count.isdigit()):
            yield problem(
                "XLA_FLAGS sets the number of virtual devices to something "
                "that is not a number.",
                f"Write {DEVICE_COUNT}4, for example.",
            )
        elif int(count) > num_cores:
            yield warning(
                f"{count} virtual CPU devices share {num_cores} "
                f"core{'s' * (num_cores > 1)}. This is useful to try a script, "
                "but not faster than fewer devices.",
                f"For speed, use {DEVICE_COUNT}{num_cores} or an accelerator.",
            )
