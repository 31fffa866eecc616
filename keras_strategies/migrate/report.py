"""The report of `migrate`, printed and written."""

import difflib
import json
import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.syntax import Syntax
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
        for row in report.left:
            _print(console, f"  {row.place}  {row.text}", "")
    if len(reports) != 1:
        _print(console, f"{len(reports)} files: {_summarize(reports)}", "bold")
    if not any(r.num_changed or r.left or r.error for r in reports):
        _print(console, "Nothing needs to change.", "")
    has_changes = any(report.num_changed for report in reports)
    if has_changes and not is_written:
        hint = "Nothing was written: --write writes, --diff shows the changes."
        _print(console, hint, "dim")


def _print(console: Console, text: str, style: str) -> None:
    console.print(Text(escape_controls(text), style=style), soft_wrap=True)


def _summarize(reports: Sequence[FileReport]) -> str:
    num_changed = sum(report.num_changed for report in reports)
    num_left = sum(len(report.left) for report in reports)
    lines = "line" if num_changed == 1 else "lines"
    left = "nothing is left" if not num_left else f"{num_left} are left"
    left = "1 is left" if num_left == 1 else left
    return f"{num_changed} {lines} changed; {left}" + (":" if num_left else "")


def print_diff(console: Console, report: FileReport) -> None:
    """Prints a file's changes, in color where stdout is a terminal."""
    text = "".join(
        difflib.unified_diff(
            _lines(report.before),
            _lines(report.after),
            f"a/{report.path}",
            f"b/{report.path}",
        )
    )
    if console.is_terminal:
        console.print(
            Syntax(text, "diff", background_color="default", word_wrap=True)
        )
    else:
        console.file.write(text)


def _lines(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return lines


def write_report(path: str, reports: Sequence[FileReport]) -> None:
    """Writes a table in Markdown, or JSON for a name that ends in .json."""
    if path.endswith(".json"):
        document = [
            {
                "path": report.path,
                "changed": report.num_changed,
                "error": report.error,
                "left": [
                    {"place": row.place, "text": row.text}
                    for row in report.left
                ],
            }
            for report in reports
        ]
        text = json.dumps({"files": document}, indent=1) + "\n"
    else:
        rows = [
            f"| {row.place} | {row.text.replace('|', chr(92) + '|')} |"
            for report in reports
            for row in report.left
        ] + [f"| {r.path} | {r.error} |" for r in reports if r.error]
        text = "\n".join(
            ["# " + _summarize(reports).rstrip(":"), ""]
            + (
                ["| line | what is left |", "|---|---|", *rows, ""]
                if rows
                else []
            )
        )
    pathlib.Path(path).write_text(text, encoding="utf-8")
