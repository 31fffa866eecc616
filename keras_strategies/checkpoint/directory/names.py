"""Names in a directory of checkpoints, and in a checkpoint."""

import os
import pathlib
import re
import stat
from typing import Any

MANIFEST = "manifest.json"
"""The file that lists the others, in a checkpoint's folder."""

RUN = "run/metadata"
"""The file with everything that is no array, in a checkpoint's folder."""

MAX_STEP = 2**63 - 1
"""The highest step."""

DELETING = ".deleting-"
"""Between the step and what is random, in the name of what is deleted."""

DAMAGED = ".damaged-"
"""Between the step and a number, in the name of what was put aside."""

_STEP = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_PARTIAL = re.compile(
    r"(0|[1-9][0-9]{0,18})"
    rf"(\.orbax-checkpoint-tmp.*|{re.escape(DELETING)}.*)",
    re.ASCII | re.DOTALL,
)
_ASIDE = re.compile(
    rf"(0|[1-9][0-9]{{0,18}}){re.escape(DAMAGED)}.*", re.ASCII | re.DOTALL
)


def step_of(name: str) -> int | None:
    """The step of a folder's name, None if it is no checkpoint's name.

    Args:
      name: The last part of a path. Decimal digits without leading zeros are
        a step: "0", "120"; not "007", "-1", "1.5" or "1 ".
    """
    if not _STEP.fullmatch(name) or int(name) > MAX_STEP:
        return None
    return int(name)


def step_path(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """The folder of a step in a directory, whether or not it exists.

    Raises:
      TypeError: the step is no integer.
      ValueError: the step is negative or too high.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(
            "A checkpoint's step is an integer. Received: an object of type "
            f"{type(step).__name__}. Give the number of train steps done."
        )
    if not 0 <= int(step) <= MAX_STEP:
        raise ValueError(
            f"A checkpoint's step is in [0, 2**63). Received: {int(step)}. "
            "Give the number of train steps done."
        )
    return pathlib.Path(directory) / str(int(step))


def find_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps with a folder in a directory, ascending, good or damaged.

    Args:
      directory: Where checkpoints are; it need not exist. Links in it are not
        followed, so a link to a checkpoint is none.

    Raises:
      NotADirectoryError: it is something else than a directory.
    """
    return [step for step, is_folder in find_entries(directory) if is_folder]


def find_entries(
    directory: str | os.PathLike[str],
) -> list[tuple[int, bool]]:
    """Everything in a directory that has a step's name, ascending.

    Returns:
      (step, whether it is a folder); a link to a folder is none.
    """
    steps: list[tuple[int, bool]] = []
    for entry in _scan(directory):
        step = step_of(entry.name)
        if step is not None:
            steps.append((step, entry.is_dir(follow_symlinks=False)))
    return sorted(steps)


def partial_saves(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """What killed saves and deletions left behind in a directory, by name.

    A save that is under way looks the same: only who holds the directory's
    lock, and is not saving, may remove them.
    """
    return _matching(directory, _PARTIAL)


def put_aside(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Damaged checkpoints that a run has put aside in a directory, by name."""
    return _matching(directory, _ASIDE)


def make_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Makes a directory of checkpoints, for its owner alone, if there is none.

    Raises:
      NotADirectoryError: there is something else.
      OSError: it cannot be made.
    """
    path = pathlib.Path(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise not_a_directory(path) from None
    except OSError as error:
        raise OSError(
            error.errno,
            "A directory of checkpoints is made if there is none. Received: "
            f"{str(path)!r}, which cannot be made: {error.strerror}. Give "
            "another directory",
        ) from error
    return path


def kind_of(status: os.stat_result) -> str:
    """What something is: "file", "folder", "symbolic link", "pipe" or other."""
    kinds: list[tuple[Any, str]] = [
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "symbolic link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
    ]
    return next(
        (kind for is_it, kind in kinds if is_it(status.st_mode)), "device"
    )


def not_a_directory(path: pathlib.Path) -> NotADirectoryError:
    """The error for a path that is to be a directory of checkpoints."""
    return NotADirectoryError(
        f"Checkpoints are in a directory. Received: {str(path)!r}, which is "
        "something else. Give a directory, which need not exist."
    )


def _matching(
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
        raise not_a_directory(path) from None
