"""A report of `doctor` on a terminal."""

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_strategies.cli.doctor.findings import Finding, Level, Part, Report

_MARKS = {
    Level.FAULT: ("x", "bold red"),
    Level.WARNING: ("!", "yellow"),
    Level.NOTE: ("-", "cyan"),
    Level.GOOD: ("+", "green"),
}
_WIDEST = 100


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints a report; of a process that is not the chief, what is wrong.

    Args:
      report: What was found.
      console: Where to print; None for stdout.
    """
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal or console.width > _WIDEST:
            console.width = min(console.width, _WIDEST)
    if report.is_chief:
        for part in report.parts:
            # The rest is said at the end.
            if part.rows or part.calm:
                console.print(_of_part(part))
    console.print(_of_result(report))


def _of_part(part: Part) -> Group:
    title = Text(part.title, style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim", min_width=22)
    table.add_column(overflow="fold")
    for name, value in part.rows:
        # Neither is markup.
        table.add_row(Text(name), Text(value))
    parts = [table, *map(_of_finding, part.calm)]
    return Group(title, *(Padding(p, (0, 0, 0, 2)) for p in parts), Text())


def _of_result(report: Report) -> Group:
    """The line with the result, after what is wrong."""
    where, wrong = report.process or report.host, report.wrong
    style = "green" if not wrong else _MARKS[wrong[0].level][1]
    result = Text(f"{where}: {report.summary}", style=style)
    return Group(*map(_of_finding, wrong), result)


def _of_finding(finding: Finding) -> Table:
    mark, style = _MARKS[finding.level]
    text = Text(finding.text)
    if finding.fix:
        text.append(f"\n{finding.fix}", style="dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1, style=style)
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table
