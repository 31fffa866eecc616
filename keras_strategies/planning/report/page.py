"""Creates a self-contained HTML page from a plan."""

import io
from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table

from keras_strategies.planning.report.planned_step import (
    KINDS,
    PlannedStep,
    format_gb,
)


def make_page(plan: RenderableType, steps: Sequence[PlannedStep]) -> str:
    """Returns the HTML of a plan's page.

    The page loads no other files and runs no scripts.

    Args:
      plan: The plan's table and sentences.
      steps: The planned step of each candidate.
    """
    console = Console(
        file=io.StringIO(),
        record=True,
        width=120,
        markup=False,
        highlight=False,
        force_jupyter=False,
    )
    console.print("keras-strategies plan\n", plan)
    for step in steps:
        fits = {True: "fits", False: "does not fit", None: "unknown"}[step.fits]
        fits = fits if step.error is None else "no result"
        console.print()
        console.print(Rule(f"{step.topology} {step.layout}: {fits}"))
        console.print(_draw_bars(step))
    return console.export_html()


def _draw_bars(step: PlannedStep) -> Table:
    """Returns the memory by category, as bars."""
    table = Table.grid(padding=(0, 3))
    total = step.bytes_in_all
    if total is not None:
        sizes = {kind: step.memory.get(kind, 0.0) for kind in KINDS}
        sizes["unspecified"] = total - sum(sizes.values())
        scale, start = max(total, step.limit_bytes or 0), 0.0
        for name, size in sizes.items():
            if size > 1e-3 * total:
                bar = Bar(scale, start, start + size)
                table.add_row(name, f"{format_gb(size)} GB", bar)
            start += size
        table.add_row("in total", f"{format_gb(total)} GB")
    if step.limit_bytes is not None:
        table.add_row("limit", f"{format_gb(step.limit_bytes)} GB")
    return table
