"""A directory of checkpoints, read without restoring any.

A run may write there at the same time. Nothing here imports jax or keras.
"""

import dataclasses
import datetime
import enum
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint,
    quote_name,
)
from keras_strategies.checkpoint.directory.documents import (
    VERSION,
    read_document,
)
from keras_strategies.checkpoint.directory.files import measure_size
from keras_strategies.checkpoint.directory.lock import Writer, find_writer
from keras_strategies.checkpoint.directory.names import (
    DELETING,
    MANIFEST,
    RUN,
    find_entries,
    find_partial_saves,
    find_quarantined,
    step_path,
)
from keras_strategies.checkpoint.directory.verify import verify

Contents = dict[str, dict[str, int]]


class State(enum.StrEnum):
    """How a checkpoint is."""

    VERIFIED = "verified"
    SAME_SIZES = "sizes match"
    DAMAGED = "damaged"
    UNDER_WAY = "being saved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint.

    Attributes:
      step: Train steps done.
      state: How it is.
      fault: What is wrong with it; empty if nothing is.
      num_bytes: Its size.
      created: When it was written, in seconds since 1970 (UTC); None if it
        does not say.
      facts: What it says of itself: "epoch", "logs", "num_processes".
      contents: By group of arrays ("model", "optimizer"), how many there are,
        "num_arrays", of how many numbers, "num_values"; empty if it does not
        say.
    """

    step: int
    state: State
    fault: str = ""
    num_bytes: int
    created: float | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contents: Contents = dataclasses.field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        """Whether it cannot be restored."""
        return self.state is State.DAMAGED

    @property
    def logs(self) -> dict[str, Any]:
        """Its metrics by name: numbers, or strings for what JSON has not."""
        logs = self.facts.get("logs")
        return logs if isinstance(logs, dict) else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """A folder that is no checkpoint.

    Attributes:
      name: Its name.
      reason: What it is: "save, stopped".
      num_bytes: Its size.
    """

    name: str
    reason: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """A directory of checkpoints.

    Attributes:
      directory: Its path.
      entries: Its checkpoints, by step.
      left_behind: What killed processes left there, and what was put aside.
      writer: Who writes there now; None for nobody.
    """

    directory: str
    entries: tuple[Entry, ...]
    left_behind: tuple[LeftBehind, ...]
    writer: Writer | None

    @property
    def damaged(self) -> list[Entry]:
        """The checkpoints that are damaged."""
        return [e for e in self.entries if e.is_damaged]

    @property
    def num_bytes(self) -> int:
        """The size of all of it."""
        parts = (*self.entries, *self.left_behind)
        return sum(part.num_bytes for part in parts)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "directory": self.directory,
            "num_bytes": self.num_bytes,
            "num_damaged": len(self.damaged),
            "checkpoints": [
                dataclasses.asdict(entry) | {"created": moment(entry.created)}
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
    """Looks at all checkpoints of a directory.

    Args:
      directory: Where they are.
      is_quick: Whether to compare names and sizes alone, not checksums.
      report: Called with each step before it is looked at.

    Raises:
      OSError: it cannot be listed.
    """
    os.listdir(directory)  # Not there, or not to be read, is an error here.
    writer = find_writer(directory)
    entries: list[Entry] = []
    found = find_entries(directory)
    for step, _ in found:
        report(step)
        is_newest = step == found[-1][0]
        entry = _entry(
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
        left_behind=_left_behind(directory, writer),
        writer=writer,
    )


def _entry(
    path: pathlib.Path, step: int, *, is_quick: bool, may_be_under_way: bool
) -> Entry | None:
    """A checkpoint; None if it was deleted meanwhile."""
    try:
        manifest = verify(path, is_quick=is_quick)
        contents = _contents(path)
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
            fault="" if is_under_way else error.fault,
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


def _contents(path: pathlib.Path) -> Contents:
    """What a checkpoint says that it holds; empty if it is not understood."""
    if not os.path.lexists(path / RUN):
        return {}
    try:
        document = read_document(path)
    except DamagedCheckpoint:
        return {}
    if document["version"] != VERSION:
        return {}
    return {
        group: {
            "num_arrays": len(arrays),
            "num_values": sum(math.prod(shape) for shape, _ in arrays.values()),
        }
        for group, arrays in document["variables"].items()
    }


def _left_behind(
    directory: str, writer: Writer | None
) -> tuple[LeftBehind, ...]:
    found: list[tuple[pathlib.Path, str]] = []
    for path in find_partial_saves(directory):
        act = "deletion" if DELETING in path.name else "save"
        how = "stopped" if writer is None else "stopped, or under way"
        found.append((path, f"{act}, {how}"))
    found += [
        (path, "damaged, put aside") for path in find_quarantined(directory)
    ]
    return tuple(
        LeftBehind(
            name=quote_name(p.name), reason=reason, num_bytes=measure_size(p)
        )
        for p, reason in found
    )


def moment(seconds: float | None) -> str | None:
    """Returns a time in ISO format (UTC); None if it is not one.

    Args:
      seconds: The time since 1970 (UTC).
    """
    if seconds is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="seconds")
