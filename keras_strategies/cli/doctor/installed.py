"""Checks installed packages and the variables that Keras and JAX read.

The checks depend only on the environment variables, a file that XLA_FLAGS
names, and a function that looks up the version of a package. They do not import
the packages.
"""

import functools
import importlib.util
import platform
from collections.abc import Callable, Iterator, Mapping

import keras_strategies
from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    make_problem,
    problem,
    warning,
)
from keras_strategies.cluster.checks import read_timeout
from keras_strategies.cluster.exchange.job_secret import VARIABLE, read_secret
from keras_strategies.gpu.xla_flags import read_flags
from keras_strategies.job import mutual_tls
from keras_strategies.names import versions
from keras_strategies.names.versions import is_switched_on

_OPTIONAL = (
    "tensorflow",
    "grain",
    "torch",
    "libtpu",
    "tensorboardX",
    "sklearn",
)
_SHOWN = ("KERAS_BACKEND", "KERAS_NNX_ENABLED", "JAX_PLATFORMS", "XLA_FLAGS")
Version = Callable[[str], str | None]


def check_packages(
    get_version: Version = versions.installed_version,
) -> Part:
    """Checks the versions of packages.

    Args:
      get_version: A function that returns the version of a package, or None if
        it is not installed.
    """
    rows = [
        ("python", platform.python_version()),
        ("keras_strategies", keras_strategies.__version__),
    ]
    findings = []
    for package in versions.MINIMUM:
        version = get_version(package)
        rows.append((package, version or "not installed"))
        findings += _check_package(package, version)
    optional = ", ".join(filter(importlib.util.find_spec, _OPTIONAL))
    rows.append(("optional", optional or "none"))
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


def check_variables(
    environ: Mapping[str, str],
    get_version: Version = versions.installed_version,
) -> Part:
    """Checks the environment variables that Keras, JAX and this package read.

    Args:
      environ: The environment variables.
      get_version: A function that returns the version of a package, or None if
        it is not installed.
    """
    rows = [(name, environ[name]) for name in _SHOWN if environ.get(name)]
    if environ.get(VARIABLE):
        rows.append((VARIABLE, "set (not shown)"))
    findings = list(_check_keras(environ))
    jax = versions.parse_version(get_version("jax") or "")
    read_tls = functools.partial(
        mutual_tls.read_mutual_tls, is_supported=jax >= mutual_tls.MIN_JAX
    )
    # These functions raise the errors with which a job would end.
    for read in (read_flags, read_secret, read_timeout, read_tls):
        try:
            value = read(environ)
        except ValueError as error:
            findings.append(make_problem(error))
        else:
            if read is read_tls and value:
                rows.append(("mutual TLS", "on"))
    return Part(title="Environment", rows=tuple(rows), findings=tuple(findings))


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
