"""Prints reports of runs as a table, several runs side by side."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_strategies.cluster.untrusted import escape_controls
from keras_strategies.reporting.document import Document, compute_goodput

_SHARES = {
    "input": "waiting for input",
    "program": "the step's programs",
    "python": "Python between them",
    "callbacks": "callbacks",
    "save": "checkpoints",
    "compile": "compilations",
    "evaluate": "evaluations",
}


def print_reports(console: Console, reports: Mapping[str, Document]) -> None:
    """Prints a table with a column for each run, and the runs' advice.

    Args:
      console: The console to print to.
      reports: The runs' reports, by the titles of the columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for title in reports:
        name = Text(escape_controls(title), overflow="fold")
        table.add_column(name, justify="right", overflow="fold")
    for label, read in _ROWS:
        cells = [read(report) for report in reports.values()]
        if any(cells):
            table.add_row(label, *map(Text, cells))
    console.print(table)
    for title, report in reports.items():
        advice = _figures(report).get("advice", "")
        lead = f"{title}: " if len(reports) > 1 else ""
        text = Text(escape_controls(lead + advice), overflow="fold")
        console.print(text)


def _figures(report: Document) -> Mapping[str, Any]:
    return report["starts"][-1]["figures"]


def _read_number(
    name: str, form: str, scale: float = 1.0
) -> Callable[[Document], str]:
    def read(report: Document) -> str:
        value = _figures(report).get(name)
        if value is None:
            return ""
        return form.format(value * scale)

    return read


def _read_step_time(report: Document) -> str:
    times = _figures(report).get("step_ms")
    if times is None:
        return ""
    return f"{times['median']:.3g} ms (p95 {times['p95']:.3g} ms)"


def _read_share(name: str) -> Callable[[Document], str]:
    def read(report: Document) -> str:
        share = _figures(report)["shares"].get(name)
        return f"{100 * share:.1f} %" if share else ""

    return read


def _read_compilations(report: Document) -> str:
    made = _figures(report)["compilations"]
    count, seconds = made["count"], made["seconds"]
    return f"{count} ({seconds:.1f} s)" if count else ""


def _read_cause(place: int) -> Callable[[Document], str]:
    def read(report: Document) -> str:
        causes = _figures(report)["compilations"]["causes"]
        if place >= len(causes):
            return ""
        one = causes[place]
        text = f"{one['cause']}: {one['seconds']:.1f} s"
        return escape_controls(text)

    return read


def _read_slowest(report: Document) -> str:
    found = _figures(report).get("processes")
    if found is None:
        return ""
    return f"{found['slowest']}, by {found['extra_ms']:.3g} ms a step"


def _read_starts(report: Document) -> str:
    count = report["num_starts"]
    return f"{count - 1}" if count > 1 else ""


def _read_repeated(report: Document) -> str:
    count, goodput = report["num_repeated"], compute_goodput(report)
    if report["num_starts"] < 2 or goodput is None:
        return ""
    return f"{count} (goodput {100 * goodput:.1f} %)"


_ROWS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("steps", lambda report: f"{report['num_steps']}"),
    ("time of a step", _read_step_time),
    ("rows per second", _read_number("rows_per_sec", "{:,.0f}")),
    ("tokens per second", _read_number("tokens_per_sec", "{:,.0f}")),
    ("model TFLOP/s", _read_number("flops_per_sec", "{:.3g}", 1e-12)),
    ("MFU", _read_number("mfu", "{:.1f} %", 100.0)),
    ("start-up", _read_number("startup_seconds", "{:.1f} s")),
    ("time after it", _read_number("seconds", "{:.1f} s")),
    *((f"  {label}", _read_share(name)) for name, label in _SHARES.items()),
    ("compiled programs", _read_compilations),
    *(("  for", _read_cause(place)) for place in range(3)),
    ("slowest process", _read_slowest),
    ("restarts", _read_starts),
    ("steps computed twice", _read_repeated),
)
