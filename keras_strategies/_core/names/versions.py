"""The versions of Keras and JAX that work, and those that are installed.

Imports neither: versions are read from the packages' files, since Keras's
nightlies lie in the folder of `keras` under another name of a distribution.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import warnings

LEAST = {
    "keras": (3, 15),
    "jax": (0, 10),
    "jaxlib": (0, 10),
    "numpy": (2,),
    "orbax-checkpoint": (0, 12, 5),
    "rich": (14, 3),
}
"""The oldest versions that work; pyproject.toml asks for the same."""

BELOW = {
    "keras": (3, 16),
    "jax": (0, 13),
    "jaxlib": (0, 13),
    "orbax-checkpoint": (0, 13),
    "rich": (16,),
}
"""The first versions that nobody has tested; as in pyproject.toml."""

TESTED = {"keras": "3.15.1", "jax": "0.10.2 and 0.12.0.1"}
"""What docs/versions.md says was tested."""

SILENCE = "KERAS_STRATEGIES_UNTESTED_VERSIONS"
"""The variable that ends the warning; "1" does."""

_FILES = {
    "keras": ("src/version.py", r'^__version__ = "([^"]+)"'),
    "jax": ("version.py", r"^_release_version[^=]*= ['\"]([^'\"]+)"),
}
_MAX_BYTES = 100_000


def check_versions() -> None:
    """Refuses versions that cannot work, and warns of those not tested.

    What is not installed is left to the import that will fail.

    Raises:
      ImportError: Keras or JAX is older than the oldest that works.
    """
    for package in TESTED:
        version = installed_version(package)
        number = parsed(version or "")
        if not number:
            continue
        if number < LEAST[package]:
            raise ImportError(
                f"keras_strategies needs {package} "
                f"{dotted(LEAST[package])} or newer. Received: {package} "
                f"{version}. {_cure(package)}"
            )
        if number >= BELOW[package] and os.environ.get(SILENCE) != "1":
            warnings.warn(
                "keras_strategies uses private names of Keras and JAX, and "
                f"works with versions that it was tested with: {package} "
                f"{TESTED[package]}. Received: {package} {version}. "
                f"{_cure(package)} To continue without this warning, set "
                f"{SILENCE}=1.",
                stacklevel=3,
            )


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed.

    That of the imported module, else what its files say, else its metadata.
    """
    module = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return _written(package) or importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parsed(version: str) -> tuple[int, ...]:
    """The numbers a version starts with; none of what is no version."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def dotted(version: tuple[int, ...]) -> str:
    """A version as one writes it."""
    return ".".join(map(str, version))


def asked(package: str) -> str:
    """What pip is asked for: `keras>=3.15,<3.16`."""
    below = f",<{dotted(BELOW[package])}" if package in BELOW else ""
    return f"{package}>={dotted(LEAST[package])}{below}"


def _cure(package: str) -> str:
    return f"Install one: pip install '{asked(package)}'."


def _written(package: str) -> str | None:
    """The version in the package's own file."""
    if package not in _FILES:
        return None
    name, pattern = _FILES[package]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # A module made by hand.
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = pathlib.Path(folder) / name
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                found = re.search(pattern, file.read(_MAX_BYTES), re.MULTILINE)
            return found[1] if found else None
    return None
