"""Whether users other than this one and root can change a directory's files."""

import errno
import os
import pathlib
import stat
import sys

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
