"""The file in which a run's report is kept, `run_report.json`.

It contains an entry for each start of the run. Nothing here imports jax or
keras, so the command line can read reports quickly.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import warnings
from typing import Any

from keras_strategies.cluster.exchange.message_forms import (
    fault_of,
    is_count,
)
from keras_strategies.cluster.untrusted import load_json, open_regular

NAME = "run_report.json"
"""The name of the file."""

MOST_STARTS = 100
"""The number of starts whose entries are kept."""

_PARTIAL = f".{NAME}-"
_MOST_BYTES = 4 << 20
_CAUSE = {"cause": str, "count": is_count, "seconds": float}
FIGURES = {
    "steps": is_count,
    "startup_seconds": float,
    "seconds": float,
    "saves": is_count,
    "compilations": {
        "count": is_count,
        "seconds": float,
        "step_seconds": float,
        "causes": [_CAUSE],
    },
    "shares": dict,
    "input_ms?": float,
    "idle?": float,
    "step_ms?": {"median": float, "p95": float, "mean": float},
    "rows_per_sec?": float,
    "tokens_per_sec?": float,
    "flops_per_sec?": float,
    "mfu?": float,
    "processes?": {
        "count": is_count,
        "slowest": is_count,
        "extra_ms": float,
        "extra_share": float,
        "input_ms": float,
        "input_share": float,
    },
    "advice?": str,
}
"""The form of the figures of a run; see `message_forms.Form`."""
_START = {
    "started": float,
    "first_step": is_count,
    "last_step": is_count,
    "is_done": bool,
    "figures": FIGURES,
}
_DOCUMENT = {
    "version": is_count,
    "first_step": is_count,
    "num_starts": is_count,
    "num_steps": is_count,
    "num_repeated": is_count,
    "starts": [_START],
}

Document = dict[str, Any]


class ReportError(Exception):
    """A directory has no report, or one that cannot be read."""


def load_report(directory: str | os.PathLike[str]) -> Document:
    """Reads the report in a directory.

    Raises:
      ReportError: if there is no report, or it has not the form of one.
    """
    path = pathlib.Path(directory) / NAME
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ReportError(
            f"A report must be in {str(path)!r}. Received: a directory "
            f"without one ({error.strerror}). Pass the directory of a run "
            "with `ks.callbacks.RunReport`."
        ) from None
    try:
        document = load_json(text, max_characters=_MOST_BYTES)
        fault = fault_of(document, _DOCUMENT) or _find_fault(document)
    except ValueError as error:
        fault = str(error)
    if fault is not None:
        raise ReportError(
            f"{str(path)!r} must be a report that `ks.callbacks.RunReport` "
            f"wrote. Received: another file ({fault}). Pass another directory, "
            "or move the file away to start a new report."
        )
    return document


def _find_fault(document: Document) -> str | None:
    for start in document["starts"]:
        values = start["figures"]["shares"].values()
        if not all(type(value) in (int, float) for value in values):
            return "its shares are not numbers"
    return None if document["starts"] else "it has no starts"


def save_report(directory: str | os.PathLike[str], document: Document) -> None:
    """Writes a report in one piece: readers see the old file or the new one."""
    folder = pathlib.Path(directory)
    handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(name, folder / NAME)
    except BaseException:
        os.unlink(name)
        raise


def delete_partial(directory: str | os.PathLike[str]) -> None:
    """Deletes the files of `save_report` that killed processes have left."""
    for path in pathlib.Path(directory).glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def try_to_save(directory: str | os.PathLike[str], document: Document) -> None:
    """Calls `save_report`, but warns if the report cannot be written."""
    try:
        save_report(directory, document)
    except OSError as error:
        # Without the temporary file's name, so that Python does not repeat the
        # warning.
        warnings.warn(
            "`RunReport` could not write its report, so training continues "
            f"without it. Received: {os.fspath(directory)!r}: "
            f"{error.strerror or error}. Free space on the disk, or choose "
            "another folder.",
            RuntimeWarning,
            stacklevel=2,
        )


def add_start(
    document: Document | None, started: float, step: int, last_step: int | None
) -> Document:
    """Returns a report with an entry for a new start of the run.

    Args:
      document: The report so far; None if there is none.
      started: The time of the start, in seconds since 1970.
      step: The step from which the run continues.
      last_step: The step that the previous start had reached, if it is known
        better than from the report.
    """
    old = document or {"num_starts": 0, "num_repeated": 0, "starts": []}
    starts = list(old["starts"])
    if starts:
        reached = max(starts[-1]["last_step"], last_step or 0)
        starts[-1] = starts[-1] | {"last_step": reached}
        step_before = reached
    else:
        step_before = step
    entry = {
        "started": started,
        "first_step": step,
        "last_step": step,
        "is_done": False,
        "figures": EMPTY,
    }
    return {
        "version": 1,
        "first_step": old.get("first_step", step),
        "num_starts": old["num_starts"] + 1,
        "num_steps": step,
        "num_repeated": old["num_repeated"] + max(step_before - step, 0),
        "starts": [*starts, entry][-MOST_STARTS:],
    }


def update_start(
    document: Document, last_step: int, figures: Any, *, is_done: bool
) -> Document:
    """Returns a report in which the last start's entry is up to date."""
    entry = document["starts"][-1] | {
        "last_step": last_step,
        "is_done": is_done,
        "figures": figures,
    }
    starts = [*document["starts"][:-1], entry]
    return document | {"num_steps": last_step, "starts": starts}


def compute_goodput(document: Document) -> float | None:
    """Returns the share of the computed steps that were not computed before.

    Returns None if no steps were computed.
    """
    useful = max(document["num_steps"] - document["first_step"], 0)
    repeated = document["num_repeated"]
    return useful / (useful + repeated) if useful + repeated else None


EMPTY: dict[str, Any] = {
    "steps": 0,
    "startup_seconds": 0.0,
    "seconds": 0.0,
    "saves": 0,
    "compilations": {
        "count": 0,
        "seconds": 0.0,
        "step_seconds": 0.0,
        "causes": [],
    },
    "shares": {},
}
"""The figures of a run that has trained no step."""
