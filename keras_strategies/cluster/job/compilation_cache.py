"""JAX's persistent compilation cache, for jobs that may be started again.

The folder is the user's own, not the directory of checkpoints: a cached program
is machine code, and checkpoints are copied from one person to another.
"""

import hashlib
import logging
import os
import pathlib
import platform
import stat
import sys
from collections.abc import Mapping
from typing import Any

_logger = logging.getLogger(__name__)

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
_MAX_BYTES = 4 * 2**30
_SETTINGS = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(_MAX_BYTES),
    # Models have many small programs.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def make_settings(
    environ: Mapping[str, str], *, warns: bool = True
) -> dict[str, str]:
    """Returns environment variables that make JAX cache compiled programs.

    The folder is created, readable and writable by this user alone. Its name
    contains a hash of the CPU's features, because a home directory may be
    shared by machines with different CPUs.

    Args:
      environ: The environment variables.
      warns: Whether to log a warning if no folder can be used.

    Returns:
      The variables that `environ` lacks. {} if `environ` has its own folder or
      disables the cache, or if no folder can be used.
    """
    if _FOLDER in environ or environ.get(_ENABLED, "1").lower() in (
        "0",
        "false",
    ):
        return {}
    try:
        folder = _make_folder(environ)
    except (OSError, RuntimeError) as error:
        _logger.log(
            logging.WARNING if warns else logging.DEBUG,
            "Compiled programs are not cached, so a restarted job compiles "
            "them again: %s. Set %s to a folder that only you can write to, or "
            "%s=false.",
            error,
            _FOLDER,
            _ENABLED,
        )
        return {}
    rest = {k: v for k, v in _SETTINGS.items() if k not in environ}
    return {_FOLDER: str(folder), **rest}


def enable(*, warns: bool) -> None:
    """Makes JAX cache compiled programs in this process, from now on.

    Does nothing if the user has configured JAX's cache. The configuration stays
    until the process ends.

    Args:
      warns: See `make_settings`.
    """
    import jax

    config: Any = jax.config  # Its options are set dynamically.
    if config.jax_compilation_cache_dir is not None or not (
        config.jax_enable_compilation_cache
    ):
        return
    for name, value in make_settings(os.environ, warns=warns).items():
        convert = str if name == _FOLDER else int
        config.update(name.lower(), convert(value))


def _make_folder(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    root = pathlib.Path(base).absolute() / "keras_strategies"
    folder = root / f"jax-{_hash_cpu()}"
    for path in (root, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if sys.platform != "win32" and (
            found.st_uid != os.getuid()
            or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise PermissionError(f"other users can write to {str(path)!r}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{str(folder)!r} cannot be written to")
    return folder


def _hash_cpu() -> str:
    """Returns a hash of the features of this machine's CPU."""
    features = platform.machine()
    try:
        lines = _CPU_INFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = ("flags", "Features", "model name")
    features += "\n".join(sorted({x for x in lines if x.startswith(wanted)}))
    return hashlib.sha256(features.encode()).hexdigest()[:12]
