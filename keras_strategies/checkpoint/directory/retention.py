"""Rules for which checkpoints are retained, and deletion of all others."""

import dataclasses
import errno
import glob
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from typing import Literal

from keras_strategies.checkpoint.directory.files import DamagedCheckpoint, flush
from keras_strategies.checkpoint.directory.manifest import Manifest
from keras_strategies.checkpoint.directory.names import (
    DAMAGED,
    DELETING,
    MANIFEST,
    find_partial_saves,
    parse_step,
    step_path,
)
from keras_strategies.cluster.checks import check_number, check_type

_GB = 1e9


def check_free_space(directory: str | os.PathLike[str], num_bytes: int) -> None:
    """Checks that the disk has enough free space for a checkpoint.

    Args:
      directory: The directory of the checkpoint.
      num_bytes: The size of the checkpoint, in bytes.

    Raises:
      OSError: (ENOSPC) if there are fewer free bytes.
    """
    free = shutil.disk_usage(directory).free
    if num_bytes <= free:
        return
    raise OSError(
        errno.ENOSPC,
        f"A checkpoint does not fit on the disk of {os.fspath(directory)!r}. "
        f"It needs {num_bytes / _GB:.3f} GB; {free / _GB:.3f} GB are free. "
        "Delete files on this disk, keep fewer checkpoints, or use another "
        "directory",
    )


def make_save_error(
    directory: str | os.PathLike[str],
    step: int,
    good: int | None,
    error: Exception,
) -> OSError:
    """Makes the error for a save that failed, for example on a full disk.

    Args:
      directory: The directory of checkpoints.
      step: The step of the failed checkpoint.
      good: The step of the newest complete checkpoint; None if none exists.
      error: The error that made the save fail.
    """
    kept = (
        "There is no earlier complete checkpoint"
        if good is None
        else f"Earlier checkpoints are good; the newest one is step {good}"
    )
    number = getattr(error, "errno", None)
    received = str(error).strip().rstrip(".") or type(error).__name__
    new = OSError(
        errno.EIO if number is None else number,
        f"The checkpoint of step {step} could not be written to "
        f"{os.fspath(directory)!r}. {kept}. Received: {received}. Make sure "
        "that the disk works and has enough space, and start again",
    )
    new.__cause__ = error
    return new


def check_name(directory: str | os.PathLike[str]) -> None:
    """Raises ValueError for a path that is unsuitable for a directory.

    A path is unsuitable if it is itself a checkpoint, or if it contains
    characters that are special in a glob pattern. Orbax 0.12 finds its files
    with a glob pattern that contains the path. If the path itself looks like a
    pattern, Orbax finds no files, and the checkpoint has no arrays
    (tests/contract/test_orbax_contract.py).

    Args:
      directory: The absolute path of a directory of checkpoints.
    """
    if glob.has_magic(os.fspath(directory)):
        raise ValueError(
            "The path of a directory of checkpoints must not contain '*', '?' "
            f"or '['. Received: {os.fspath(directory)!r}. Use another name, "
            "for example 'lr=0.1' instead of 'lr=[0.1]'."
        )
    path = pathlib.Path(directory)
    if parse_step(path.name) is not None and (path / MANIFEST).exists():
        raise ValueError(
            "Checkpoints must be saved in a directory of checkpoints. "
            f"Received: {os.fspath(directory)!r}, which is itself a "
            "checkpoint. Pass its parent directory: "
            f"{os.fspath(path.parent)!r}."
        )


_logger = logging.getLogger(__name__)

_SECONDS_PER_HOUR = 3600
_COUNT = "Pass a number of checkpoints."
_MODES = ("auto", "min", "max")
_LOSSES = re.compile(r"loss|error|divergence|crossentropy|hinge|poisson")
# Substrings in the names of Keras metrics for which higher values are better.
_MAX = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|correlation"
    r"|similarity|f1|f2|f_?beta|f_?score|f_?measure|r2|io_?u|dice|bleu|rouge"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Rules for which checkpoints are retained.

    A checkpoint is retained if at least one of the rules applies to it. The
    newest good checkpoint is always retained.

        ks.checkpoint.Keep(last=3, best="val_accuracy", num_best=2)

    Attributes:
      last: The number of newest checkpoints to retain; None or 0 for all, like
        TensorFlow's `keep_checkpoint_max`.
      every_n_hours: Also retains a checkpoint forever each time that this
        number of hours has passed since the start of the run, or since the last
        checkpoint that this rule retained. Like TensorFlow's
        `keep_checkpoint_every_n_hours`; None disables this rule.
      best: The name of a metric, as in the `logs` of `fit` ("val_loss"). Also
        retains the checkpoints with the best values of this metric. None
        disables this rule. A checkpoint whose metric is NaN or missing is never
        among the best.
      mode: Whether lower ("min") or higher ("max") values of the metric are
        better. "auto" infers this from the metric's name ("max" for accuracies,
        AUC, precision and similar Keras metrics).
      num_best: The number of best checkpoints to retain.
    """

    last: int | None = 5
    every_n_hours: float | None = None
    best: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"
    num_best: int = 1

    def __post_init__(self):
        check_number("`last`", self.last, _COUNT, minimum=0)
        check_number(
            "`num_best`", self.num_best, _COUNT, minimum=1, is_optional=False
        )
        check_number(
            "`every_n_hours`",
            self.every_n_hours,
            "Pass a number of hours, or None.",
            above=0,
            is_whole=False,
        )
        fix = 'Pass a name such as "val_loss".'
        check_type("`best`", self.best, str | None, "a metric's name", fix)
        if self.mode not in _MODES:
            raise ValueError(
                '`mode` must be "auto", "min" or "max". Received: '
                f'mode={self.mode!r}. Use "min" for losses.'
            )

    @property
    def is_max(self) -> bool:
        """Whether higher values of the metric are better."""
        if self.mode != "auto":
            return self.mode == "max"
        name = (self.best or "").lower()
        return bool(_MAX.search(name)) and not _LOSSES.search(name)


def as_keep(keep: int | Keep | None) -> Keep:
    """Returns a `Keep`; a number n is converted to `Keep(last=n)`.

    Raises:
      TypeError: if `keep` is neither a number, None, nor a `Keep`.
    """
    return keep if isinstance(keep, Keep) else Keep(last=keep)


def find_deletable(manifests: Iterable[Manifest], keep: Keep) -> list[int]:
    """Finds the steps that no rule retains, in ascending order.

    Args:
      manifests: The manifests of all good checkpoints of a run, in any order.
        The run started at the time "started" in their `facts` (in seconds since
        1970), or at the oldest checkpoint if this is missing.
      keep: The rules.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.step)
    if not keep.last or not ordered:
        return []
    older = ordered[: -keep.last]
    kept = _find_periodic(ordered, older, keep) | _find_best(ordered, keep)
    return [entry.step for entry in older if entry.step not in kept]


def delete(directory: str | os.PathLike[str], step: int) -> None:
    """Deletes a checkpoint, good or damaged, if it exists.

    The directory is renamed first, so that it does not look like a checkpoint
    while its files are being deleted. Links are deleted and never followed.
    Only one process may call this function.

    Raises:
      OSError: if the directory cannot be renamed.
    """
    path = step_path(directory, step)
    doomed = path.with_name(f"{path.name}{DELETING}{secrets.token_hex(4)}")
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    flush(doomed.parent)
    _remove(doomed)


def quarantine(problem: DamagedCheckpoint) -> str:
    """Renames a damaged checkpoint, so that its step can be saved again.

    Returns:
      The new name of its directory.
    """
    path = problem.path
    assert path is not None
    aside = path.with_name(f"{path.name}{DAMAGED}{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside.name


def delete_partial_saves(directory: str | os.PathLike[str]) -> list[str]:
    """Deletes the remains of killed saves and deletions.

    Only the chief may call it, while it holds the directory's lock and is not
    saving.

    Returns:
      The names of the deleted files and directories.
    """
    paths = find_partial_saves(directory)
    for path in paths:
        _remove(path)
    return [path.name for path in paths]


def _find_periodic(
    ordered: list[Manifest], older: list[Manifest], keep: Keep
) -> set[int]:
    """Returns the older steps that the rule `every_n_hours` retains."""
    if keep.every_n_hours is None:
        return set()
    last_retained = _find_start(ordered)
    kept: set[int] = set()
    for entry in older:
        hours = (entry.created - last_retained) / _SECONDS_PER_HOUR
        if hours >= keep.every_n_hours:
            last_retained = entry.created
            kept.add(entry.step)
    return kept


def _find_start(ordered: list[Manifest]) -> float:
    """Returns the start of a run, in seconds since 1970."""
    starts = (_to_finite(entry.facts.get("started")) for entry in ordered)
    known = [start for start in starts if start is not None]
    return min(known, default=ordered[0].created)


def _find_best(ordered: list[Manifest], keep: Keep) -> set[int]:
    if keep.best is None:
        return set()
    sign = -1 if keep.is_max else 1
    ranked: list[tuple[float, int]] = []
    for entry in ordered:
        logs = entry.facts.get("logs")
        value = (
            _to_finite(logs.get(keep.best)) if isinstance(logs, dict) else None
        )
        if value is not None:
            # If values are equal, the earliest step counts as the best, as in
            # Keras.
            ranked.append((sign * value, entry.step))
    return {step for _, step in sorted(ranked)[: keep.num_best]}


def _to_finite(value: object) -> float | None:
    """Converts a finite number to float.

    Returns None for anything else, such as the string "NaN".
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _remove(path: os.PathLike[str]) -> None:
    """Deletes a file, a link, or a directory with its contents."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # The directory no longer looks like a checkpoint, so the run continues.
        _logger.warning(
            "%s cannot be deleted: %s. Delete it by hand.", path, error.strerror
        )
