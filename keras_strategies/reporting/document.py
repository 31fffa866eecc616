"""A run's report as a file, `run_report.json`, and as a table.

The file contains an entry for each start of the run. Nothing here imports jax
or keras, so the command line can read reports quickly.
"""

import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_strategies.cluster.untrusted import (
    escape_controls,
    load_json,
    open_regular,
)

NAME = "run_report.json"
"""The name of the file."""

MAX_STARTS = 100
"""The number of starts whose entries are kept."""

_MAX_BYTES = 4 << 20
_WRONG = ArithmeticError, AttributeError, LookupError, TypeError, ValueError

Document = dict[str, Any]

EMPTY: dict[str, Any] = {
    "steps": 0,
    "startup_seconds": 0.0,
    "seconds": 0.0,
    "saves": 0,
    "compilations": {"count": 0, "seconds": 0.0, "causes": []},
    "shares": {},
}
"""The figures of a run that has trained no step."""

_SHARES = {
    "input": "waiting for input",
    "program": "the step's programs",
    "python": "Python between them",
    "callbacks": "callbacks",
    "save": "checkpoints",
    "compile": "compilations",
    "evaluate": "evaluations",
}


class ReportError(Exception):
    """A directory has no report, or one that cannot be read."""


def load_report(directory: str | os.PathLike[str]) -> Document:
    """Reads the report in a directory.

    Raises:
      ReportError: if there is no report, or it cannot be shown and continued.
    """
    path = pathlib.Path(directory) / NAME
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_BYTES + 1)
        document = load_json(text, max_characters=_MAX_BYTES)
        describe_report(document)
        add_start(document, 0.0, 0)
    except (OSError, *_WRONG) as error:
        found = "another file"
        if isinstance(error, OSError):
            found = f"a directory without one ({error.strerror})"
        raise ReportError(
            f"{str(path)!r} must be a report that `ks.callbacks.RunReport` "
            f"wrote. Received: {found}. Pass the directory of a run, or move "
            "the file away to start a new report."
        ) from None
    return document


def describe_report(document: Document) -> dict[str, str]:
    """Returns the lines of a report's table by their labels.

    The line of a value that is not known is empty.
    """
    figures = document["starts"][-1]["figures"]
    made, shares = figures["compilations"], figures["shares"]
    num_restarts, repeated = document["num_starts"] - 1, ""
    if num_restarts:
        goodput = compute_goodput(document)
        repeated = f"{document['num_repeated']} (goodput {100 * goodput:.1f} %)"

    def show(form: str, name: str, scale: float = 1.0) -> str:
        value = figures.get(name)
        if value is None or isinstance(value, dict):
            return form.format_map(value) if value else ""
        return form.format(value * scale)

    lines = {
        "steps": f"{document['num_steps']:d}",
        "time of a step": show("{median:.3g} ms (p95 {p95:.3g} ms)", "step_ms"),
        "rows per second": show("{:,.0f}", "rows_per_sec"),
        "tokens per second": show("{:,.0f}", "tokens_per_sec"),
        "model TFLOP/s": show("{:.3g}", "flops_per_sec", 1e-12),
        "MFU": show("{:.1f} %", "mfu", 100.0),
        "start-up": show("{:.1f} s", "startup_seconds"),
        "time after it": show("{:.1f} s", "seconds"),
    }
    for name, label in _SHARES.items():
        share = shares.get(name)
        lines[f"  {label}"] = f"{100 * share:.1f} %" if share else ""
    lines["compiled programs"] = (
        f"{made['count']} ({made['seconds']:.1f} s)" if made["count"] else ""
    )
    lines |= {
        "  for": "\n".join(
            f"{one['cause']}: {one['seconds']:.1f} s"
            for one in made["causes"][:3]
        ),
        "slowest process": show(
            "{slowest}, by {extra_ms:.3g} ms a step", "processes"
        ),
        "restarts": f"{num_restarts}" if num_restarts else "",
        "steps computed twice": repeated,
        "advice": figures.get("advice", ""),
    }
    return {
        label: escape_controls(line, keeps="\n")
        for label, line in lines.items()
    }


def print_reports(console: Console, reports: Mapping[str, Document]) -> None:
    """Prints a table with a column for each run, and the runs' advice.

    Args:
      console: The console to print to.
      reports: The runs' reports, by the titles of the columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    columns = [describe_report(report) for report in reports.values()]
    advice = [column.pop("advice") for column in columns]
    for title in reports:
        name = Text(escape_controls(title), overflow="fold")
        table.add_column(name, justify="right", overflow="fold")
    for label in columns[0]:
        cells = [column[label] for column in columns]
        if any(cells):
            table.add_row(label, *map(Text, cells))
    console.print(table)
    for title, text in zip(reports, advice, strict=True):
        lead = f"{escape_controls(title)}: " if len(reports) > 1 else ""
        console.print(Text(lead + text, overflow="fold"))


def save_report(directory: str | os.PathLike[str], document: Document) -> None:
    """Writes a report in one piece: readers see the old file or the new one.

    Warns if it cannot be written.
    """
    partial = pathlib.Path(directory, f".{NAME}-partial")
    try:
        # Left by a process that was killed.
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(partial, partial.with_name(NAME))
    except OSError as error:
        warnings.warn(
            "`RunReport` could not write its report, so training continues "
            f"without it. Received: {os.fspath(directory)!r}: "
            f"{error.strerror or error}. Free space on the disk, or choose "
            "another directory.",
            RuntimeWarning,
            stacklevel=2,
        )


def add_start(document: Document | None, started: float, step: int) -> Document:
    """Returns a report with an entry for a new start of the run.

    Args:
      document: The report so far; None if there is none.
      started: The time of the start, in seconds since 1970.
      step: The step from which the run continues.
    """
    old = document or {"num_starts": 0, "num_repeated": 0, "starts": []}
    reached = old["starts"][-1]["last_step"] if document else step
    entry = {"started": started, "first_step": step, "last_step": step}
    entry |= {"is_done": False, "figures": EMPTY}
    return {
        "version": 1,
        "first_step": old.get("first_step", step),
        "num_starts": old["num_starts"] + 1,
        "num_steps": step,
        "num_repeated": old["num_repeated"] + max(reached - step, 0),
        "starts": [*old["starts"], entry][-MAX_STARTS:],
    }


def update_start(
    document: Document, last_step: int, figures: Any, *, is_done: bool
) -> Document:
    """Returns a report in which the last start's entry is up to date."""
    entry = document["starts"][-1] | {"last_step": last_step}
    entry |= {"is_done": is_done, "figures": figures}
    starts = [*document["starts"][:-1], entry]
    return document | {"num_steps": last_step, "starts": starts}


def compute_goodput(document: Document) -> float:
    """Returns the share of the computed steps that were not computed before."""
    useful = max(document["num_steps"] - document["first_step"], 0)
    return useful / max(useful + document["num_repeated"], 1)
