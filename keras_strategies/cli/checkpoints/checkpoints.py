"""The command `keras-strategies checkpoints`, which lists checkpoints."""

import dataclasses
import json
import os
import sys

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from keras_strategies.checkpoint.directory.files import quote_name
from keras_strategies.checkpoint.directory.names import MANIFEST
from keras_strategies.cli.checkpoints.checkpoint_list import (
    Entry,
    Listing,
    look_at,
)
from keras_strategies.cluster.untrusted import escape_controls

_DAMAGED = 1
_WRONG_ARGUMENTS = 2


def checkpoints(
    directory: str, *, quick: bool = False, as_json: bool = False
) -> int:
    """Verifies the checkpoints in a directory, and prints a table of them.

    It changes nothing, so a run may be writing to the directory at the same
    time.

    Args:
      directory: The directory of checkpoints, or an Estimator's `model_dir`.
      quick: Whether to compare only names and sizes, not checksums.
      as_json: Whether to print JSON instead of the table.

    Returns:
      The exit status: 0 on success, 1 if a checkpoint is damaged, 2 if
      `directory` is not a directory of checkpoints.
    """
    problem = _find_problem(directory)
    if problem:
        print(f"keras-strategies checkpoints: {problem}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    # The status is shown only on terminals.
    with Console(stderr=True).status("Checking the files"):
        listing = look_at(directory, is_quick=quick)
    if as_json:
        print(json.dumps(dataclasses.asdict(listing), indent=1))
    else:
        print_listing(listing, Console(highlight=False))
    return _DAMAGED if listing.num_damaged else 0


def print_listing(listing: Listing, console: Console) -> None:
    """Prints a table of checkpoints, what is wrong with them, and a summary.

    Args:
      listing: The directory's checkpoints.
      console: The console to print to.
    """
    _print(console, listing.directory, "bold")
    if listing.checkpoints:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("step", "size", "saved (UTC)", "state", "epochs"):
            side = "left" if name == "state" else "right"
            table.add_column(name, justify=side, overflow="fold")
        table.add_column("metrics", overflow="fold")
        for entry in listing.checkpoints:
            style = "bold red" if entry.problem else ""
            table.add_row(*map(Text, _make_cells(entry)), style=style)
        console.print(table)
    for left in listing.left_behind:
        size = decimal(left.num_bytes)
        _print(console, f"Left behind: {left.name}, {size}: {left.reason}.")
    for entry in listing.checkpoints:
        if entry.problem:
            text = f"Step {entry.step} is damaged: {entry.problem}."
            _print(console, text, "bold red")
    if listing.writer is not None:
        _print(console, f"A run is writing here: {listing.writer}.")
    count, wrong = len(listing.checkpoints), listing.num_damaged
    counts = f"{count or 'No'} checkpoint{'s' * (count != 1)}"
    damaged = f", {wrong} damaged" * bool(wrong)
    size = f", {decimal(listing.num_bytes)}" * bool(listing.num_bytes)
    _print(console, f"{counts}{damaged}{size}.")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(escape_controls(text), style=style, overflow="fold"))


def _make_cells(entry: Entry) -> list[str]:
    """Creates the cells of a checkpoint's row in the table."""
    epoch, logs = entry.facts.get("epoch"), entry.facts.get("logs")
    # Line breaks are escaped: a line break in the name of a metric would
    # separate the name from its value.
    metrics = [
        f"{escape_controls(name)}={_format(value)}"
        for name, value in (logs if isinstance(logs, dict) else {}).items()
    ]
    return [
        str(entry.step),
        decimal(entry.num_bytes),
        (entry.created or "")[:16].replace("T", " "),
        entry.state,
        "" if epoch is None else _format(epoch),
        ", ".join(metrics),
    ]


def _format(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape_controls(text)


def _find_problem(directory: str) -> str | None:
    """Returns what is wrong with the argument `directory`, or None."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        return (
            f"{quote_name(directory)} cannot be listed: {error.strerror}. Pass "
            "the directory that contains a run's checkpoints."
        )
    if MANIFEST in names:
        return (
            f"{quote_name(directory)} is a single checkpoint. Pass the "
            "directory that contains it."
        )
    return None
