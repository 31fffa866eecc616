"""Prints reports of runs as a table, several runs side by side."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_strategies.cluster.untrusted import escape_controls
from keras_strategies.reporting.document import Document, describe_report


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
