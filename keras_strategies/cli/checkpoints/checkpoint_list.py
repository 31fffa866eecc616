"""Lists and verifies the checkpoints in a directory; restores none of them.

A run may be writing to the directory at the same time. This module imports
neither jax nor keras.
"""

import dataclasses
import datetime
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from keras_strategies.checkpoint.directory.files import (
    DamagedCheckpoint,
    measure_size,
    quote_name,
)
from keras_strategies.checkpoint.directory.lock import find_writer
from keras_strategies.checkpoint.directory.names import (
    DELETING,
    MANIFEST,
    find_partial_saves,
    find_quarantined,
    find_steps,
    step_path,
)
from keras_strategies.checkpoint.directory.verify import verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint in a list.

    Attributes:
      step: The number of train steps completed when it was saved.
      state: "verified", "sizes match", "damaged" or "being saved".
      problem: A description of the damage; empty if it is not damaged.
      num_bytes: The size in bytes.
      created: The time when it was saved, in ISO format (UTC); None if unknown.
      facts: The metadata in its manifest, such as "epoch", "logs" and
        "num_processes".
    """

    step: int
    state: str
    problem: str = ""
    num_bytes: int
    created: str | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """A file or directory that is not a checkpoint.

    Attributes:
      name: The name of the file or directory.
      reason: The reason why it exists, for example "interrupted save".
      num_bytes: The size in bytes.
    """

    name: str
    reason: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The contents of a directory of checkpoints.

    Attributes:
      directory: The path of the directory.
      num_bytes: The total size in bytes.
      num_damaged: The number of damaged checkpoints.
      checkpoints: The checkpoints, sorted by step.
      left_behind: The files and directories that killed processes left behind,
        and damaged checkpoints that a run has renamed.
      writer: The process that is writing to the directory, or None.
    """

    directory: str
    num_bytes: int
    num_damaged: int
    checkpoints: tuple[Entry, ...]
    left_behind: tuple[LeftBehind, ...]
    writer: str | None


def look_at(directory: str, *, is_quick: bool = False) -> Listing:
    """Verifies and lists all checkpoints of a directory.

    Args:
      directory: The directory of checkpoints.
      is_quick: Whether to compare only names and sizes, not checksums.

    Raises:
      OSError: if the directory cannot be listed.
    """
    os.listdir(directory)  # Raises OSError if unreadable.
    writer = find_writer(directory)
    steps = find_steps(directory)
    found = [
        _make_entry(
            step_path(directory, step),
            step,
            is_quick=is_quick,
            may_be_under_way=writer is not None and step == steps[-1],
        )
        for step in steps
    ]
    entries = tuple(entry for entry in found if entry is not None)
    left_behind = _find_left_behind(directory, writer)
    return Listing(
        directory=os.path.abspath(directory),
        num_bytes=sum(part.num_bytes for part in (*entries, *left_behind)),
        num_damaged=sum(bool(entry.problem) for entry in entries),
        checkpoints=entries,
        left_behind=left_behind,
        writer=writer,
    )


def _make_entry(
    path: pathlib.Path, step: int, *, is_quick: bool, may_be_under_way: bool
) -> Entry | None:
    """Verifies a checkpoint; returns None if it has just been deleted."""
    num_bytes = measure_size(path)
    try:
        manifest = verify(path, is_quick=is_quick)
    except DamagedCheckpoint as error:
        if not os.path.lexists(path):
            return None
        is_partial = not os.path.lexists(path / MANIFEST)
        if may_be_under_way and is_partial:
            return Entry(step=step, state="being saved", num_bytes=num_bytes)
        return Entry(
            step=step,
            state="damaged",
            problem=error.problem,
            num_bytes=num_bytes,
        )
    return Entry(
        step=step,
        state="sizes match" if is_quick else "verified",
        num_bytes=num_bytes,
        created=_format_time(manifest.created),
        facts=manifest.facts,
    )


def _find_left_behind(
    directory: str, writer: str | None
) -> tuple[LeftBehind, ...]:
    found = dict.fromkeys(find_partial_saves(directory), "")
    how = "interrupted" if writer is None else "interrupted or running"
    for path in found:
        act = "deletion" if DELETING in path.name else "save"
        found[path] = f"{how} {act}"
    quarantined = find_quarantined(directory)
    found |= dict.fromkeys(quarantined, "damaged, renamed by a run")
    return tuple(
        LeftBehind(
            name=quote_name(p.name), reason=reason, num_bytes=measure_size(p)
        )
        for p, reason in found.items()
    )


def _format_time(seconds: float) -> str | None:
    """Formats a time in ISO format (UTC); returns None for invalid times."""
    try:
        time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return time.isoformat(timespec="seconds")
