"""`keras-strategies checkpoints`: the list of a directory's checkpoints."""

import json
import os
import sys

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from keras_strategies.checkpoint.directory.corruption import shown
from keras_strategies.checkpoint.directory.names import MANIFEST, step_of
from keras_strategies.cli.checkpoints.checkpoint_list import (
    Entry,
    Listing,
    look_at,
    moment,
)
from keras_strategies.cluster.untrusted import escape_controls

_DAMAGED = 1
_WRONG_ARGUMENTS = 2


def checkpoints(
    directory: str, *, quick: bool = False, as_json: bool = False
) -> int:
    """Looks at all checkpoints of a directory and prints them.

    A run may write there meanwhile: nothing is changed.

    Args:
      directory: Where they are; the `model_dir` of an Estimator is one, too.
      quick: Whether to compare names and sizes alone, not checksums.
      as_json: Whether to print JSON in place of the table.

    Returns:
      The exit status: 0; 1 if a checkpoint is damaged; 2 if the directory
      cannot be looked at.
    """
    fault = _fault_of(directory)
    if fault:
        print(f"keras-strategies checkpoints: {fault}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    with Console(stderr=True).status("") as status:  # On terminals alone.
        listing = look_at(
            directory,
            is_quick=quick,
            report=lambda step: status.update(f"Checking step {step}"),
        )
    if as_json:
        print(json.dumps(listing.as_dict(), indent=1))
    else:
        print_listing(listing, Console(highlight=False))
    return _DAMAGED if listing.damaged else 0


def print_listing(listing: Listing, console: Console) -> None:
    """Prints a table of checkpoints, what is wrong, and a summary.

    Args:
      listing: The directory's checkpoints.
      console: Where to print.
    """
    _print(console, listing.directory, "bold")
    if listing.entries:
        columns = ("step", "size", "saved (UTC)", "state", "epochs", "values")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in columns:
            side = "left" if name == "state" else "right"
            table.add_column(name, justify=side, overflow="fold")
        table.add_column("metrics", overflow="fold")
        for entry in listing.entries:
            style = "bold red" if entry.is_damaged else ""
            table.add_row(*map(Text, _cells(entry)), style=style)
        console.print(table)
    for left in listing.left_behind:
        size = decimal(left.num_bytes)
        _print(console, f"Left behind: {left.name}, {size}: {left.reason}.")
    for entry in listing.damaged:
        text = f"Step {entry.step} is damaged: {entry.fault}."
        _print(console, text, "bold red")
    if listing.writer is not None:
        _print(console, f"Written to by {listing.writer}.")
    count, wrong = len(listing.entries), len(listing.damaged)
    counts = f"{count or 'No'} checkpoint{'s' * (count != 1)}"
    damaged = f", {wrong} damaged" * bool(wrong)
    size = f", {decimal(listing.num_bytes)}" * bool(listing.num_bytes)
    _print(console, f"{counts}{damaged}{size}.")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(escape_controls(text), style=style, overflow="fold"))


def _cells(entry: Entry) -> list[str]:
    """Returns a checkpoint's row of the table."""
    epoch = entry.facts.get("epoch")
    count = sum(group["num_values"] for group in entry.contents.values())
    # A line break within a metric would part its name from its value.
    metrics = (
        f"{escape_controls(k)}={_short(v)}" for k, v in entry.logs.items()
    )
    return [
        str(entry.step),
        decimal(entry.num_bytes),
        (moment(entry.created) or "")[:16].replace("T", " "),
        entry.state.value,
        "" if epoch is None else _short(epoch),
        f"{count:,}" if entry.contents else "",
        ", ".join(metrics),
    ]


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape_controls(text)


def _fault_of(directory: str) -> str | None:
    """What is wrong with the argument."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        return (
            f"{shown(directory)} cannot be listed: {error.strerror}. Give the "
            "directory of a run's checkpoints."
        )
    name = os.path.basename(os.path.abspath(directory))
    if MANIFEST in names and step_of(name) is not None:
        above = os.path.dirname(os.path.abspath(directory))
        return (
            f"{shown(directory)} is one checkpoint. Give the directory that it "
            f"is in: {shown(above)}."
        )
    return None
