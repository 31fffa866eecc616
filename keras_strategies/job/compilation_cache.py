"""JAX's persistent compilation cache, for jobs that may be started again.

The folder is the user's own, not the directory of checkpoints: a cached program
is machine code, and checkpoints are copied from one person to another.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import filelock

from keras_strategies.job import trusted_folder

_logger = logging.getLogger(__name__)

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
FIX = (
    "Let only yourself write to it and to the folders above it (chmod go-w), "
    f"set {_FOLDER} to another folder, or set {_ENABLED}=false."
)
"""What to do if programs cannot be cached."""

_MAX_BYTES = 4 * 2**30
_SETTINGS = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(_MAX_BYTES),
    # Models have many small programs.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
_LOCK_S = 10.0
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def make_settings(
    environ: Mapping[str, str], *, warns: bool = True
) -> dict[str, str]:
    """Returns environment variables that make JAX cache compiled programs.

    The folder is created, readable and writable by this user alone, and freed
    of programs that a process did not finish writing. Its name contains a hash
    of the CPU's features, because a home directory may be shared by machines
    with different CPUs.

    Args:
      environ: The environment variables.
      warns: Whether to log a warning if no folder can be used.

    Returns:
      The variables that `environ` lacks. {} if `environ` has its own folder or
      disables the cache, or if no folder can be used.
    """
    if _FOLDER in environ or _is_disabled(environ):
        return {}
    try:
        folder = _make_folder(environ)
    except (OSError, RuntimeError) as error:
        if warns:
            _warn(str(error))
        return {}
    rest = {k: v for k, v in _SETTINGS.items() if k not in environ}
    return {_FOLDER: str(folder), **rest}


def find_problem(environ: Mapping[str, str]) -> str:
    """Returns why programs cannot be cached, or "". Creates no folder."""
    if _is_disabled(environ):
        return ""
    given = environ.get(_FOLDER)
    try:
        if given is None:
            _check_folder(_find_folder(environ))
        elif given and "://" not in given and os.path.lexists(given):
            os.listdir(given)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def enable(*, warns: bool) -> None:
    """Makes JAX cache compiled programs in this process, from now on.

    Does nothing if the user has configured JAX's cache. The configuration stays
    until the process ends.

    Args:
      warns: See `make_settings`.
    """
    import jax

    config: Any = jax.config  # Its options are set dynamically.
    is_set = config.jax_compilation_cache_dir is not None
    if is_set or not config.jax_enable_compilation_cache:
        return
    for name, value in make_settings(os.environ, warns=warns).items():
        convert = str if name == _FOLDER else int
        config.update(name.lower(), convert(value))


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get(_ENABLED, "1").lower() in ("0", "false")


@functools.cache  # Each problem is said once.
def _warn(problem: str) -> None:
    _logger.warning(
        "Compiled programs are not cached, so a restarted job compiles them "
        "again: %s. %s",
        problem,
        FIX,
    )


def _find_folder(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    root = pathlib.Path(base).absolute() / "keras_strategies"
    return root / f"jax-{_hash_cpu()}"


def _make_folder(environ: Mapping[str, str]) -> pathlib.Path:
    folder = _find_folder(environ)
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    _check_folder(folder)
    if _list_unfinished(folder):
        # The lock that JAX takes while it writes.
        with filelock.FileLock(folder / ".lockfile", timeout=_LOCK_S):
            for path in _list_unfinished(folder):
                path.unlink(missing_ok=True)
    return folder


def _check_folder(folder: pathlib.Path) -> None:
    """Raises an error if a folder, which may not exist yet, cannot be used."""
    trusted_folder.check_folder(folder)
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{str(nearest)!r} cannot be written to")


def _list_unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the programs without a time of use, and times without a program.

    JAX writes the time last, so such a program may be incomplete. Because of
    it, JAX (before 0.11.2) cannot find out what to delete, and so does not
    cache other programs. JAX also deletes the time last; such a time would make
    a later program that is incomplete look complete.
    """
    names = set(os.listdir(folder))
    pairs = {"-cache": "-atime", "-atime": "-cache"}
    return [
        folder / name
        for name in names
        if (other := pairs.get(name[-6:])) and name[:-6] + other not in names
    ]


def _hash_cpu() -> str:
    """Returns a hash of the features of this machine's CPU."""
    features, lines = platform.machine(), [platform.processor()]
    with contextlib.suppress(OSError):
        lines = _CPU_INFO.read_text("utf-8", "replace").splitlines()
    wanted = ("flags", "Features", "model name")
    features += "\n".join(sorted({x for x in lines if x.startswith(wanted)}))
    return hashlib.sha256(features.encode()).hexdigest()[:12]
