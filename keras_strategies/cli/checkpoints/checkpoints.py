"""`keras-strategies checkpoints`: the list of a directory's checkpoints."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from keras_strategies.checkpoint.directory.corruption import shown
from keras_strategies.checkpoint.directory.names import MANIFEST, step_of
from keras_strategies.cli.checkpoints.checkpoint_list import look_at
from keras_strategies.cli.checkpoints.checkpoint_table import (
    print_listing,
)

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
    with _reporting() as report:
        listing = look_at(directory, is_quick=quick, report=report)
    if as_json:
        print(json.dumps(listing.as_dict(), indent=1))
    else:
        print_listing(listing, time.time())
    return _DAMAGED if listing.damaged else 0


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


@contextlib.contextmanager
def _reporting() -> Iterator[Callable[[int], object]]:
    """Shows on a terminal which step is looked at: that may take a while."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    with console.status("") as status:
        yield lambda step: status.update(f"Checking step {step}")
