"""Checks at import: the versions of Keras and JAX, and Keras's backend.

This module imports neither package.
"""

import contextlib
import importlib.metadata
import os
import re
import sys
import warnings
from typing import Any

MINIMUM = {
    "keras": (3, 15),
    "jax": (0, 10),
    "jaxlib": (0, 10),
    "numpy": (2,),
    "orbax-checkpoint": (0, 12, 5),
    "rich": (14, 3),
}
"""The oldest supported versions, as in pyproject.toml."""

BELOW = {
    "keras": (3, 16),
    "jax": (0, 13),
    "jaxlib": (0, 13),
    "orbax-checkpoint": (0, 13),
    "rich": (16,),
}
"""The first untested versions, as in pyproject.toml."""

TESTED = {"keras": "3.15.1", "jax": "0.10.2 and 0.12.0.1"}
"""The tested versions, as in docs/versions.md."""

SILENCE = "KERAS_STRATEGIES_UNTESTED_VERSIONS"
"""The environment variable that silences the warning if it is "1"."""

_BACKEND = "KERAS_BACKEND"
_NNX = "KERAS_NNX_ENABLED"
_COMMAND = "keras-strategies"
_COMMAND_MODULE = "keras_strategies.cli"


def check_at_import() -> None:
    """Checks the versions and chooses the backend, unless the command runs.

    Raises:
      ImportError: see `check_versions` and `choose_backend`.
    """
    if not is_command():
        check_versions()
        choose_backend()


def check_versions() -> None:
    """Checks that Keras and JAX are supported; warns about untested versions.

    A package that is not installed is ignored, because its import will fail
    later anyway.

    Raises:
      ImportError: if Keras or JAX is older than the oldest supported version.
    """
    for package in TESTED:
        version = installed_version(package)
        number = parse_version(version or "")
        if not number:
            continue
        if number < MINIMUM[package]:
            raise ImportError(
                f"keras_strategies needs {package} "
                f"{format_version(MINIMUM[package])} or newer. Received: "
                f"{package} {version}. {_advise_install(package)}"
            )
        if number >= BELOW[package] and os.environ.get(SILENCE) != "1":
            warnings.warn(
                "keras_strategies may only work with the tested versions: "
                f"{package} {TESTED[package]}. Received: {package} {version}. "
                f"{_advise_install(package)} Set {SILENCE}=1 to silence this.",
                stacklevel=4,
            )


def installed_version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed.

    The version is taken from the imported module, else from the package's
    metadata.
    """
    module = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    # Keras's nightly builds are imported as `keras`.
    for name in (package, f"{package}-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def parse_version(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, or () if it has none.

    For example, "3.15.0rc1" results in (3, 15, 0).
    """
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def format_version(version: tuple[int, ...]) -> str:
    """Joins the numbers of a version with dots."""
    return ".".join(map(str, version))


def make_requirement(package: str) -> str:
    """Returns a requirement for pip, such as `keras>=3.15,<3.16`."""
    below = f",<{format_version(BELOW[package])}" if package in BELOW else ""
    return f"{package}>={format_version(MINIMUM[package])}{below}"


def _advise_install(package: str) -> str:
    requirement = make_requirement(package)
    return f"Install a supported version: pip install '{requirement}'."


def is_command() -> bool:
    """Returns whether this process runs the command `keras-strategies`.

    The command must start even if Keras's backend is not JAX, so that its
    subcommand `doctor` can report the wrong backend.
    """
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name == "-m":  # `python -m` has not found the module's file yet.
        words = [word.removeprefix("-m") for word in sys.orig_argv]
        return _COMMAND_MODULE in words
    return name.removesuffix(".exe").removesuffix("-script.py") == _COMMAND


def choose_backend() -> None:
    """Selects JAX as Keras's backend if none is selected.

    Raises:
      ImportError: if another backend or NNX variables are selected, either in
        an already imported keras or in the environment.
    """
    keras: Any = sys.modules.get("keras")
    if keras is None:
        backend = os.environ.setdefault(_BACKEND, "jax")
        _check(backend, has_nnx=is_switched_on(os.environ.get(_NNX, "")))
    elif hasattr(keras, "config"):  # Another thread may be importing it.
        check_backend(keras)


def check_backend(keras: Any) -> None:
    """Checks that Keras runs on JAX without NNX variables.

    Args:
      keras: The module.

    Raises:
      ImportError: if Keras was imported with another backend or with
        KERAS_NNX_ENABLED.
    """
    _check(keras.config.backend(), has_nnx=keras.config.is_nnx_enabled())


def is_switched_on(value: str) -> bool:
    """Returns whether Keras reads an environment variable's value as "on"."""
    return value.lower() in ("true", "1")


def _check(backend: str, *, has_nnx: bool) -> None:
    if backend != "jax":
        raise ImportError(
            "keras_strategies needs Keras on the JAX backend. Received: "
            f"backend {backend!r}. Set KERAS_BACKEND=jax in the "
            "environment before keras is imported (or import "
            "keras_strategies first with KERAS_BACKEND unset)."
        )
    if has_nnx:
        raise ImportError(
            "keras_strategies does not support NNX variables, but "
            "KERAS_NNX_ENABLED is set. Unset this environment variable "
            "before keras is imported."
        )
