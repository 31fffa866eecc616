"""Names of files and directories in a directory of checkpoints."""

import os
import pathlib
import re
import stat
from typing import Any

from keras_strategies.names import dry_run

MANIFEST = "manifest.json"
"""The file in a checkpoint's directory that lists the other files."""

RUN = "run/metadata"
"""The file in a checkpoint's directory that contains all data except arrays."""

MAX_STEP = 2**63 - 1
"""The highest step."""

SAVING = ".saving"
"""The text after the step in the name of a directory that is being saved."""

DELETING = ".deleting-"
"""The text after the step in the name of a directory that is being deleted."""

DAMAGED = ".damaged-"
"""The text after the step in the name of a damaged checkpoint's directory."""

_STEP = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_PARTIAL = re.compile(
    r"(0|[1-9][0-9]{0,18})"
    rf"({re.escape(SAVING)}|({re.escape(SAVING)})?\.orbax-checkpoint-tmp.*"
    rf"|{re.escape(DELETING)}.*)",
    re.ASCII | re.DOTALL,
)
_ASIDE = re.compile(
    rf"(0|[1-9][0-9]{{0,18}}){re.escape(DAMAGED)}.*", re.ASCII | re.DOTALL
)


def parse_step(name: str) -> int | None:
    """Parses the name of a checkpoint's directory as a step.

    Args:
      name: The last component of a path.

    Returns:
      The step if the name consists of decimal digits without leading zeros,
      such as "0" or "120". None for other names, such as "007", "-1", "1.5" or
      "1 ".
    """
    if not _STEP.fullmatch(name) or int(name) > MAX_STEP:
        return None
    return int(name)


def step_path(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Returns the path of a step's directory in a directory; it need not exist.

    Raises:
      TypeError: if the step is not an integer.
      ValueError: if the step is negative or too high.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(
            "A checkpoint's step must be an integer. Received: an object of "
            f"type {type(step).__name__}. Pass the number of completed train "
            "steps."
        )
    if not 0 <= int(step) <= MAX_STEP:
        raise ValueError(
            "A checkpoint's step must be in [0, 2**63). Received: "
            f"{int(step)}. Pass the number of completed train steps."
        )
    return pathlib.Path(directory) / str(int(step))


def saving_path(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Returns the path at which a step's directory is until it is complete."""
    path = step_path(directory, step)
    return path.with_name(f"{path.name}{SAVING}")


def find_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Finds the steps of all checkpoints in a directory, good or damaged.

    Returns the steps in ascending order.

    Args:
      directory: The directory of checkpoints; it need not exist. Links in it
        are not followed, so a link to a checkpoint does not count.

    Raises:
      NotADirectoryError: if `directory` is not a directory.
    """
    return [
        step for step, is_directory in find_entries(directory) if is_directory
    ]


def find_entries(
    directory: str | os.PathLike[str],
) -> list[tuple[int, bool]]:
    """Finds everything in a directory whose name is a step.

    Returns:
      Pairs (step, whether the entry is a directory), sorted by step. A link to
      a directory does not count as a directory. In a dry run, nothing is found.
    """
    steps: list[tuple[int, bool]] = []
    if dry_run.get() is not None:
        return steps
    for entry in _scan(directory):
        step = parse_step(entry.name)
        if step is not None:
            steps.append((step, entry.is_dir(follow_symlinks=False)))
    return sorted(steps)


def find_partial_saves(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Finds the remains of killed saves and deletions, by their names.

    The directory of a running save has such a name, too. So only the process
    that holds the directory's lock may remove the directories that are found,
    and only while it is not saving.
    """
    return _find_matching(directory, _PARTIAL)


def find_quarantined(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Finds damaged checkpoints that a run has renamed, sorted by name."""
    return _find_matching(directory, _ASIDE)


def make_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Creates a directory of checkpoints (mode 0700) unless it exists.

    Raises:
      NotADirectoryError: if the path is not a directory.
      OSError: if it cannot be created.
    """
    path = pathlib.Path(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise make_directory_error(path) from None
    except OSError as error:
        raise OSError(
            error.errno,
            "The directory of checkpoints must exist or be creatable. "
            f"Received: {str(path)!r}, which cannot be created: "
            f"{error.strerror}. Use another directory",
        ) from error
    return path


def describe_kind(status: os.stat_result) -> str:
    """Returns what an entry is, such as "directory" or "symbolic link"."""
    kinds: list[tuple[Any, str]] = [
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "symbolic link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
    ]
    return next(
        (kind for is_kind, kind in kinds if is_kind(status.st_mode)), "device"
    )


def make_directory_error(path: pathlib.Path) -> NotADirectoryError:
    """Makes the error for a path that is not a directory of checkpoints."""
    return NotADirectoryError(
        f"Checkpoints must be in a directory. Received: {str(path)!r}, which "
        "is not a directory. Pass the path of a directory; it need not exist."
    )


def _find_matching(
    directory: str | os.PathLike[str], pattern: re.Pattern[str]
) -> list[pathlib.Path]:
    return sorted(
        pathlib.Path(entry.path)
        for entry in _scan(directory)
        if pattern.fullmatch(entry.name)
    )


def _scan(directory: str | os.PathLike[str]) -> list["os.DirEntry[str]"]:
    path = pathlib.Path(directory)
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise make_directory_error(path) from None
