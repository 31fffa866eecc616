"""The report of `migrate`, printed."""

import difflib
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from keras_strategies.cluster.untrusted import escape_controls
from keras_strategies.migrate.project import FileReport


def print_report(
    console: Console, reports: Sequence[FileReport], *, is_written: bool
) -> None:
    """Prints the files that change, the lines that are left, and a total."""
    for report in reports:
        if report.error:
            _print(console, f"{report.path}: {report.error}", "red")
        elif report.num_changed or report.left:
            _print(console, f"{report.path}: {_summarize([report])}", "bold")
        for place, text in report.left:
            _print(console, f"  {place}  {text}", "")
    if len(reports) != 1:
        _print(console, f"{len(reports)} files: {_summarize(reports)}", "bold")
    if not any(r.num_changed or r.left or r.error for r in reports):
        _print(console, "Nothing needs to change.", "")
    if any(report.num_changed for report in reports) and not is_written:
        hint = "Nothing was written: --write writes, --diff shows the changes."
        _print(console, hint, "dim")


def _print(console: Console, text: str, style: str) -> None:
    console.print(Text(escape_controls(text), style=style), soft_wrap=True)


def _summarize(reports: Sequence[FileReport]) -> str:
    num_changed = sum(report.num_changed for report in reports)
    num_left = sum(len(report.left) for report in reports)
    lines = "line" if num_changed == 1 else "lines"
    few = {0: "nothing is left", 1: "1 is left:"}
    left = few.get(num_left, f"{num_left} are left:")
    return f"{num_changed} {lines} changed; {left}"


def print_diff(console: Console, report: FileReport) -> None:
    """Prints a file's changes."""
    texts = report.before.splitlines(), report.after.splitlines()
    names = f"a/{report.path}", f"b/{report.path}"
    lines = difflib.unified_diff(*texts, *names, lineterm="")
    console.file.write("\n".join([*lines, ""]))
