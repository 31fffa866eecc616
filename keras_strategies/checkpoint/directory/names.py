"""Names of files and directories in a directory of checkpoints."""

import os
import pathlib
import re
import tempfile

from keras_strategies.cluster.checks import check_number
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
    fix = "Pass the number of completed train steps."
    check_number(
        "A checkpoint's step",
        step,
        fix,
        minimum=0,
        maximum=MAX_STEP,
        is_optional=False,
    )
    return pathlib.Path(directory) / str(int(step))


def saving_path(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Returns the path at which a step's directory is until it is complete."""
    path = step_path(directory, step)
    return path.with_name(f"{path.name}{SAVING}")


def find_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Finds everything in a directory whose name is a step.

    Returns the steps in ascending order; in a dry run, none. The checkpoints
    may be damaged, and may be links or files.

    Args:
      directory: The directory of checkpoints; it need not exist.

    Raises:
      NotADirectoryError: if `directory` is not a directory.
    """
    if dry_run.get() is not None:
        return []
    steps = [parse_step(name) for name in _list_names(directory)]
    return sorted(step for step in steps if step is not None)


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
      OSError: if the path is not a directory, or this user cannot write to it.
    """
    path = pathlib.Path(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, prefix=".probe-") as file:
            file.write(b"\0")
    except OSError as error:
        raise OSError(
            error.errno,
            "The directory of checkpoints must be a directory that is writable "
            f"by this user. Received: {str(path)!r}: {error.strerror}. Use "
            "another directory, or change the permissions of this one",
        ) from error
    return path


def _find_matching(
    directory: str | os.PathLike[str], pattern: re.Pattern[str]
) -> list[pathlib.Path]:
    names = sorted(filter(pattern.fullmatch, _list_names(directory)))
    return [pathlib.Path(directory, name) for name in names]


def _list_names(directory: str | os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
