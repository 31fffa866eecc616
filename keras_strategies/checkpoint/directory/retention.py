"""The retention of checkpoints, and the deletion of the others."""

import dataclasses
import logging
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from typing import Literal

from keras_strategies.checkpoint.directory.corruption import DamagedCheckpoint
from keras_strategies.checkpoint.directory.files import flush
from keras_strategies.checkpoint.directory.manifest import Manifest
from keras_strategies.checkpoint.directory.names import (
    DELETING,
    partial_saves,
    step_path,
)
from keras_strategies.cluster.checks import check_number

_logger = logging.getLogger(__name__)

_SECONDS_PER_HOUR = 3600
_COUNT = "Give a number of checkpoints."
_MODES = ("auto", "min", "max")
_LOSSES = re.compile(r"loss|error|divergence|crossentropy|hinge|poisson")
# Names of Keras's metrics that are better when they are higher.
_MAX = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|correlation"
    r"|similarity|f1|f2|f_?beta|f_?score|f_?measure|r2|io_?u|dice|bleu|rouge"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints are retained: those that any of the rules retains.

    The newest good one is always retained.

        ks.checkpoint.Keep(last=3, best="val_accuracy", num_best=2)

    Attributes:
      last: How many of the newest; None or 0 for all, as tf's
        `keep_checkpoint_max`.
      every_n_hours: Beside them, one for ever for every so many hours of the
        run, as tf's `keep_checkpoint_every_n_hours`; None for none.
      best: Beside them, the best by this metric, a name as in `logs`:
        "val_loss"; None for none. Where the metric is NaN or missing, a
        checkpoint is never the best.
      mode: "min" or "max": what is best; "auto" takes it from the name, as
        Keras's metrics have it ("max" for accuracies, AUC, precision, ...).
      num_best: How many of the best.
    """

    last: int | None = 5
    every_n_hours: float | None = None
    best: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"
    num_best: int = 1

    def __post_init__(self):
        check_number("`last`", self.last, _COUNT, least=0)
        check_number(
            "`num_best`", self.num_best, _COUNT, least=1, is_optional=False
        )
        check_number(
            "`every_n_hours`",
            self.every_n_hours,
            "Give a number of hours, or None.",
            above=0,
            is_whole=False,
        )
        if self.best is not None and not isinstance(self.best, str):
            raise TypeError(
                "`best` is a metric's name. Received: an object of type "
                f'{type(self.best).__name__}. Give a name, as "val_loss".'
            )
        if self.best is not None and not self.best.strip():
            raise ValueError(
                f"`best` is a metric's name. Received: best={self.best!r}. "
                'Give a name, as "val_loss", or None.'
            )
        if self.mode not in _MODES:
            raise ValueError(
                '`mode` is "auto", "min" or "max". Received: '
                f'mode={self.mode!r}. Give "min" for losses.'
            )

    @property
    def is_max(self) -> bool:
        """Whether the highest of `best` is the best."""
        if self.mode != "auto":
            return self.mode == "max"
        name = (self.best or "").lower()
        return bool(_MAX.search(name)) and not _LOSSES.search(name)


def as_keep(keep: object) -> Keep:
    """The rules that are meant: a number is how many of the newest.

    Raises:
      TypeError: it is neither a number nor a `Keep`.
    """
    if isinstance(keep, Keep):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return Keep(last=keep)
    raise TypeError(
        "`keep` is a number of checkpoints or a `ks.checkpoint.Keep`. "
        f"Received: keep={keep!r}. Give `ks.checkpoint.Keep(last=None)` to "
        "keep all."
    )


def to_delete(manifests: Iterable[Manifest], keep: Keep) -> list[int]:
    """The steps that no rule retains, ascending.

    Args:
      manifests: Those of all good checkpoints of a run, in any order. The
        run's hours are counted from the fact "started" (seconds since 1970),
        or from the oldest of them if it is not said.
      keep: The rules.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.step)
    if not keep.last or not ordered:
        return []
    older = ordered[: -keep.last]
    kept = _retained_for_ever(ordered, older, keep) | _best(ordered, keep)
    return [entry.step for entry in older if entry.step not in kept]


def delete(directory: str | os.PathLike[str], step: int) -> None:
    """Deletes a checkpoint, good or damaged; nothing if there is none.

    It is renamed first, so that nobody takes it for a checkpoint while its
    files go. Links are deleted, never followed. To be called by one process.

    Raises:
      OSError: it cannot be renamed.
    """
    path = step_path(directory, step)
    doomed = path.with_name(f"{path.name}{DELETING}{secrets.token_hex(4)}")
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    flush(doomed.parent)
    _remove(doomed)


def set_aside(fault: DamagedCheckpoint) -> str:
    """Renames a damaged checkpoint, so that its step can be saved again.

    Returns:
      Its new name.
    """
    assert fault.path is not None
    for number in range(1, 1000):
        aside = fault.path.with_name(f"{fault.path.name}.damaged-{number}")
        if not os.path.lexists(aside):
            os.rename(fault.path, aside)
            return aside.name
    raise fault


def delete_partial_saves(directory: str | os.PathLike[str]) -> list[str]:
    """Deletes what killed saves and deletions left behind.

    To be called by the chief alone, which holds the directory's lock, while no
    save is under way.

    Returns:
      The names of what was deleted.
    """
    paths = partial_saves(directory)
    for path in paths:
        _remove(path)
    return [path.name for path in paths]


def _retained_for_ever(
    ordered: list[Manifest], older: list[Manifest], keep: Keep
) -> set[int]:
    """The first of the older ones of every so many hours."""
    if keep.every_n_hours is None:
        return set()
    last_retained = _start_of(ordered)
    kept: set[int] = set()
    for entry in older:
        hours = (entry.created - last_retained) / _SECONDS_PER_HOUR
        if hours >= keep.every_n_hours:
            last_retained = entry.created
            kept.add(entry.step)
    return kept


def _start_of(ordered: list[Manifest]) -> float:
    """When a run started, in seconds since 1970."""
    starts = [_number(entry.facts.get("started")) for entry in ordered]
    known = [start for start in starts if start is not None]
    return min(known) if known else ordered[0].created


def _best(ordered: list[Manifest], keep: Keep) -> set[int]:
    if keep.best is None:
        return set()
    sign = -1 if keep.is_max else 1
    ranked: list[tuple[float, int]] = []
    for entry in ordered:
        logs = entry.facts.get("logs")
        value = _number(logs.get(keep.best)) if isinstance(logs, dict) else None
        if value is not None:
            # The first of equal ones, as in Keras.
            ranked.append((sign * value, entry.step))
    return {step for _, step in sorted(ranked)[: keep.num_best]}


def _number(value: object) -> float | None:
    """A finite number; None for anything else, as "NaN"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _remove(path: os.PathLike[str]) -> None:
    """Deletes a file, a link, or a folder with what is in it."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # It is no checkpoint any more; the run need not end for it.
        _logger.warning(
            "%s cannot be deleted: %s. Delete it by hand.", path, error.strerror
        )
