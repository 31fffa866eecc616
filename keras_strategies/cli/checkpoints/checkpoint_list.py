"""Lists and verifies the checkpoints in a directory; restores none of them.

A run may be writing to the directory at the same time. This module imports
neither jax nor keras.
"""

import contextlib
import dataclasses
import datetime
import enum
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from keras_strategies.checkpoint.directory.documents import (
    VERSION,
    read_document,
)
from keras_strategies.checkpoint.directory.files import (
    DamagedCheckpoint,
    measure_size,
    quote_name,
)
from keras_strategies.checkpoint.directory.lock import Writer, find_writer
from keras_strategies.checkpoint.directory.names import (
    DELETING,
    MANIFEST,
    find_entries,
    find_partial_saves,
    find_quarantined,
    step_path,
)
from keras_strategies.checkpoint.directory.verify import verify

Contents = dict[str, dict[str, int]]


class State(enum.StrEnum):
    """The state of a checkpoint, as shown in the list."""

    VERIFIED = "verified"
    SAME_SIZES = "sizes match"
    DAMAGED = "damaged"
    UNDER_WAY = "being saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint in a list.

    Attributes:
      step: The number of train steps completed when it was saved.
      state: Whether the checkpoint is good, damaged or being saved.
      problem: A description of the damage; empty if it is not damaged.
      num_bytes: The size in bytes.
      created: The time when it was saved, in seconds since 1970 (UTC); None if
        unknown.
      facts: The metadata in its manifest, such as "epoch", "logs" and
        "num_processes".
      contents: For each group of arrays, such as "model" and "optimizer", a
        dict with the number of arrays ("num_arrays") and their total number of
        elements ("num_values"); empty if unknown.
    """

    step: int
    state: State
    problem: str = ""
    num_bytes: int
    created: float | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contents: Contents = dataclasses.field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        """Whether the checkpoint is damaged and cannot be restored."""
        return self.state is State.DAMAGED

    @property
    def logs(self) -> dict[str, Any]:
        """The metrics by name. Values are numbers, or strings such as "NaN"."""
        logs = self.facts.get("logs")
        return logs if isinstance(logs, dict) else {}


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
      entries: The checkpoints, sorted by step.
      left_behind: The files and directories that killed processes left behind,
        and damaged checkpoints that a run has renamed.
      writer: The process that is writing to the directory, or None.
    """

    directory: str
    entries: tuple[Entry, ...]
    left_behind: tuple[LeftBehind, ...]
    writer: Writer | None

    @property
    def damaged(self) -> list[Entry]:
        """The entries of damaged checkpoints."""
        return [e for e in self.entries if e.is_damaged]

    @property
    def num_bytes(self) -> int:
        """The total size in bytes."""
        parts = (*self.entries, *self.left_behind)
        return sum(part.num_bytes for part in parts)

    def as_dict(self) -> dict[str, Any]:
        """Returns the listing as a dict that can be written as JSON."""
        return {
            "directory": self.directory,
            "num_bytes": self.num_bytes,
            "num_damaged": len(self.damaged),
            "checkpoints": [
                dataclasses.asdict(entry)
                | {"created": format_time(entry.created)}
                for entry in self.entries
            ],
            "left_behind": list(map(dataclasses.asdict, self.left_behind)),
            "writer": self.writer and dataclasses.asdict(self.writer),
        }


def look_at(
    directory: str,
    *,
    is_quick: bool = False,
    report: Callable[[int], object] = lambda step: None,
) -> Listing:
    """Verifies and lists all checkpoints of a directory.

    Args:
      directory: The directory of checkpoints.
      is_quick: Whether to compare only names and sizes, not checksums.
      report: The function to call with the step of each checkpoint, before the
        checkpoint is verified.

    Raises:
      OSError: if the directory cannot be listed.
    """
    os.listdir(directory)  # Raises OSError if unreadable.
    writer = find_writer(directory)
    entries: list[Entry] = []
    steps = [step for step, _ in find_entries(directory)]
    for step in steps:
        report(step)
        is_newest = step == steps[-1]
        entry = _make_entry(
            step_path(directory, step),
            step,
            is_quick=is_quick,
            may_be_under_way=writer is not None and is_newest,
        )
        if entry is not None:
            entries.append(entry)
    return Listing(
        directory=os.path.abspath(directory),
        entries=tuple(entries),
        left_behind=_find_left_behind(directory, writer),
        writer=writer,
    )


def _make_entry(
    path: pathlib.Path, step: int, *, is_quick: bool, may_be_under_way: bool
) -> Entry | None:
    """Verifies a checkpoint; returns None if it has just been deleted."""
    try:
        manifest = verify(path, is_quick=is_quick)
        contents = _read_contents(path)
    except DamagedCheckpoint as error:
        if not os.path.lexists(path):
            return None
        is_partial = error.file == MANIFEST and not os.path.lexists(
            path / MANIFEST
        )
        is_under_way = may_be_under_way and is_partial
        return Entry(
            step=step,
            state=State.UNDER_WAY if is_under_way else State.DAMAGED,
            problem="" if is_under_way else error.problem,
            num_bytes=measure_size(path),
        )
    return Entry(
        step=step,
        state=State.SAME_SIZES if is_quick else State.VERIFIED,
        num_bytes=manifest.num_bytes + measure_size(path / MANIFEST),
        created=manifest.created,
        facts=manifest.facts,
        contents=contents,
    )


def _read_contents(path: pathlib.Path) -> Contents:
    """Counts the arrays in a checkpoint by group; {} if it is unreadable."""
    document: dict[str, Any] = {}
    with contextlib.suppress(DamagedCheckpoint):
        document = read_document(path)
    if document.get("version") != VERSION:
        return {}
    return {
        group: {
            "num_arrays": len(arrays),
            "num_values": sum(math.prod(shape) for shape, _ in arrays.values()),
        }
        for group, arrays in document["variables"].items()
    }


def _find_left_behind(
    directory: str, writer: Writer | None
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


def format_time(seconds: float | None) -> str | None:
    """Formats a time in ISO format (UTC); returns None for invalid times.

    Args:
      seconds: The time in seconds since 1970 (UTC).
    """
    if seconds is None:
        return None
    try:
        time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return time.isoformat(timespec="seconds")
