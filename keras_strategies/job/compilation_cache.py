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
FIX = (
    "Let only yourself write to it and to the directories above it (chmod "
    f"go-w), set {_DIRECTORY} to another directory, or set {_ENABLED}=false."
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


def find_problem(environ: Mapping[str, str]) -> str:
    """Returns why programs cannot be cached, or "". Creates no directory."""
    if _is_disabled(environ):
        return ""
    given = environ.get(_DIRECTORY)
    try:
        if given is None:
            _check_directory(_find_directory(environ))
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
        FIX,
    )


def _find_directory(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    root = pathlib.Path(base).absolute() / "keras_strategies"
    return root / f"jax-{_hash_cpu()}"


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


def _check_directory(directory: pathlib.Path) -> None:
    """Raises an error if a directory, which need not exist, cannot be used."""
    check_directory(directory)
    nearest = next(p for p in (directory, *directory.parents) if p.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{str(nearest)!r} cannot be written to")


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


def check_directory(directory: pathlib.Path) -> None:
    """Raises an error if another user can change a directory or its files.

    Each directory from the root on must belong to this user or to root. Others
    must not be able to write to it, unless it is sticky, as /tmp is: there,
    they cannot replace what does not belong to them. Of a symbolic link, its
    owner and its target count. A part of the path that does not exist is not
    checked.

    Args:
      directory: An absolute path.

    Raises:
      PermissionError: if another user can change the directory or a file in it.
      NotADirectoryError: if it is not a directory.
      FileNotFoundError: if a link has no target.
    """
    if sys.platform == "win32":
        return
    try:
        found = _check_path(directory)
    except FileNotFoundError:
        parts = (directory, *directory.parents)
        if any(part.is_symlink() and not part.exists() for part in parts):
            raise
        return
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)
        )
    for name in os.listdir(directory):
        try:
            _check_entry(directory / name, found)
        except FileNotFoundError:  # JAX deletes old programs at any time.
            continue


def _check_path(
    path: pathlib.Path, *, is_parent: bool = False
) -> os.stat_result:
    """Checks all parts of a path; returns the status of its target."""
    os.path.realpath(path, strict=True)  # Raises an error for a loop of links.
    found = _check(pathlib.Path(path.anchor), is_parent=True)
    for part in (*reversed(path.parents[:-1]), path):
        is_above = is_parent or part != path
        found = _check(part, is_parent=is_above)
        if stat.S_ISLNK(found.st_mode):
            target = os.path.normpath(part.parent / os.readlink(part))
            found = _check_path(pathlib.Path(target), is_parent=is_above)
    return found


def _check_entry(path: pathlib.Path, directory: os.stat_result) -> None:
    # A group that cannot enter the directory cannot reach the files in it, so
    # that a umask such as 002 does no harm.
    mask = ~0 if directory.st_mode & stat.S_IXGRP else ~stat.S_IWGRP
    if stat.S_ISLNK(_check(path, is_parent=False, mask=mask).st_mode):
        _check_path(path)


def _check(
    path: pathlib.Path, *, is_parent: bool, mask: int = ~0
) -> os.stat_result:
    found = _lstat(path)
    mode = found.st_mode & mask
    is_protected = stat.S_ISLNK(mode) or (is_parent and mode & stat.S_ISVTX)
    is_writable = mode & stat.S_IWOTH or (
        mode & stat.S_IWGRP and _has_other_members(found.st_gid)
    )
    if (is_writable and not is_protected) or found.st_uid not in (
        0,
        os.geteuid(),
    ):
        raise PermissionError(
            f"other users can write to {str(path)!r} (owner {found.st_uid}, "
            f"group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):o})"
        )
    return found


def _has_other_members(number: int) -> bool:
    """Returns whether a group has members besides this user and root.

    A directory service that does not list its users cannot tell; then only a
    group of the user's name counts as private.
    """
    import grp
    import pwd

    # Many containers run as an arbitrary user in root's group.
    if number == 0:
        return False
    try:
        group = grp.getgrgid(number)
    except KeyError:
        return False
    me, users = os.geteuid(), pwd.getpwall()
    if me not in {user.pw_uid for user in users}:
        try:
            return group.gr_name != pwd.getpwuid(me).pw_name
        except KeyError:  # A container's arbitrary user.
            pass
    members = {user.pw_name for user in users if user.pw_gid == number}
    trusted = {user.pw_name for user in users if user.pw_uid in (0, me)}
    return bool(members.union(group.gr_mem) - trusted)
