"""JAX's persistent compilation cache, for jobs that may be started again.

The directory is the user's own, not the directory of checkpoints: a cached
program is machine code, and checkpoints are copied from one person to another.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import pathlib
import platform
import stat
import sys
from collections.abc import Mapping
from typing import Any

import filelock

_logger = logging.getLogger(__name__)

_DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
_FIX = (
    "Let only yourself write to it and to the directories above it (chmod "
    f"go-w), set {_DIRECTORY} to another directory, or set {_ENABLED}=false."
)

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

    The directory is created, readable and writable by this user alone, and
    freed of programs that a process did not finish writing. Its name contains a
    hash of the CPU's features, because a home directory may be shared by
    machines with different CPUs.

    Args:
      environ: The environment variables.
      warns: Whether to log a warning if no directory can be used.

    Returns:
      The variables that `environ` lacks. {} if `environ` has its own directory
      or disables the cache, or if no directory can be used.
    """
    if _DIRECTORY in environ or _is_disabled(environ):
        return {}
    try:
        directory = _make_directory(environ)
    except (OSError, RuntimeError) as error:
        if warns:
            _warn(str(error))
        return {}
    rest = {k: v for k, v in _SETTINGS.items() if k not in environ}
    return {_DIRECTORY: str(directory), **rest}


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
        convert = str if name == _DIRECTORY else int
        config.update(name.lower(), convert(value))


def _is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get(_ENABLED, "1").lower() in ("0", "false")


@functools.cache  # Each problem is said once.
def _warn(problem: str) -> None:
    _logger.warning(
        "Compiled programs are not cached, so a restarted job compiles them "
        "again: %s. %s",
        problem,
        _FIX,
    )


def _find_directory(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    root = pathlib.Path(base).absolute() / "keras_strategies"
    # Without links: only who can write to these directories can replace it.
    return (root / f"jax-{_hash_cpu()}").resolve()


def _make_directory(environ: Mapping[str, str]) -> pathlib.Path:
    directory = _find_directory(environ)
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    _check_directory(directory)
    if _list_unfinished(directory):
        # The lock that JAX takes while it writes.
        with filelock.FileLock(directory / ".lockfile", timeout=_LOCK_S):
            for path in _list_unfinished(directory):
                path.unlink(missing_ok=True)
    return directory


def _list_unfinished(directory: pathlib.Path) -> list[pathlib.Path]:
    """Lists the programs without a time of use, and times without a program.

    JAX writes the time last, so such a program may be incomplete. Because of
    it, JAX (before 0.11.2) cannot find out what to delete, and so does not
    cache other programs. JAX also deletes the time last; such a time would make
    a later program that is incomplete look complete.
    """
    names = set(os.listdir(directory))
    pairs = {"-cache": "-atime", "-atime": "-cache"}
    return [
        directory / name
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


_lstat = os.lstat


def _check_directory(directory: pathlib.Path) -> None:
    """Raises an error if another user can change a directory or its files.

    Each directory from the root on must belong to this user or to root. Others
    must not be able to write to it, unless it is sticky, as /tmp is: there,
    they cannot replace what does not belong to them. The directory itself must
    be closed to others. A part of the path that does not exist is not checked.

    Args:
      directory: An absolute path without symbolic links.

    Raises:
      PermissionError: if another user can change the directory or a file in it,
        or if this user cannot.
      NotADirectoryError: if it is not a directory.
    """
    if sys.platform == "win32":
        return
    nearest = directory.root
    for path in (*reversed(directory.parents), directory):
        try:
            found = _lstat(path)
        except FileNotFoundError:
            break
        nearest, mode = path, found.st_mode
        if not stat.S_ISDIR(mode):
            number = errno.ENOTDIR
            raise NotADirectoryError(number, os.strerror(number), str(path))
        is_open = mode & stat.S_IWOTH or (
            mode & stat.S_IWGRP and not _is_private(found.st_gid)
        )
        is_open = is_open and not mode & stat.S_ISVTX
        if path == directory:
            is_open = mode & (stat.S_IRWXG | stat.S_IRWXO)
        if is_open or found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"other users can write to {str(path)!r} (owner "
                f"{found.st_uid}, group {found.st_gid}, mode "
                f"{stat.S_IMODE(mode):o})"
            )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{str(nearest)!r} cannot be written to")


def _is_private(group: int) -> bool:
    """Returns whether a group has, by its name, no other members.

    These are root's group, in which many containers run an arbitrary user,
    groups without a name, and a group of this user's name.
    """
    import grp
    import pwd

    try:
        name = grp.getgrgid(group).gr_name
    except KeyError:
        return True
    try:
        return group == 0 or name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # A user without a name.
        return False
