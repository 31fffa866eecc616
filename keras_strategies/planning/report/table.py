"""`Plan`: what a step needs on each candidate slice, as a table and as JSON."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import rich.box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from keras_strategies.planning.report.page import make_page
from keras_strategies.planning.report.planned_step import (
    PlannedStep,
    fastest,
    in_gb,
)

_MANY = 10_000
_WIDE = 100
"""Columns of a terminal that has room for the whole table."""
Show = Callable[[Sequence[PlannedStep], str], None]
NOTES = (
    "Bytes and collectives are the compiler's; times are estimates, and no "
    "step is faster than its bounds.",
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a step needs on each candidate: prints as a table.

    What `Strategy.plan` returns. Nothing of it has run.

    Attributes:
      steps: The candidates, in the order in which they were given.
      notes: What holds for all of them, in sentences.

    Example:
      ```python
      plan = strategy.plan(model, (x, y))
      print(plan)
      best = plan.fastest
      ```
    """

    steps: Sequence[PlannedStep]
    notes: Sequence[str] = ()

    @property
    def fastest(self) -> PlannedStep | None:
        """Of those that fit the one with most rows a second and chip."""
        return fastest(self.steps)

    def to_json(self) -> dict[str, Any]:
        """All of it, as `json.dumps` takes it."""
        steps = [step.to_json() for step in self.steps]
        return {"version": 1, "steps": steps, "notes": list(self.notes)}

    def to_html(self) -> str:
        """A page with the table, and each candidate's memory as bars."""
        return make_page(self.steps, self.notes)

    def _repr_html_(self) -> str:
        # Inside of a notebook, and without its style.
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" '
            'title="keras-strategies plan" sandbox style="width: 100%; '
            'height: 40rem; border: 0"></iframe>'
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        width = options.max_width
        is_wide = width >= _WIDE
        table = _table(self, is_wide, is_stacked=False)
        endless = options.update(max_width=_MANY)
        if Measurement.get(console, endless, table).maximum > width:
            table = _table(self, is_wide, is_stacked=True)
        yield table
        yield from map(Text, _sentences(self))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=120)
        console.print(self)
        lines = console.export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__


@contextlib.contextmanager
def live_table(*, is_shown: bool = True) -> Iterator[Show]:
    """Shows a table on the error output while it is filled, on a terminal.

    Args:
      is_shown: Whether it is shown at all.

    Yields:
      Shows the steps that are known, and what is being done.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda steps, text: None
        return
    from rich.console import Group
    from rich.live import Live
    from rich.spinner import Spinner

    def show(steps: Sequence[PlannedStep], text: str) -> None:
        live.update(Group(Plan(steps=tuple(steps)), Spinner("dots", text)))

    with Live(console=Console(stderr=True), transient=True) as live:
        yield show


def _table(plan: Plan, is_wide: bool, is_stacked: bool) -> Table:
    """The table; stacked layouts are below the names of their slices."""
    is_of_tokens = any(step.tokens is not None for step in plan.steps)
    headers = [
        *("rows", "fits", "GB a\ndevice", "most\nrows"),
        *("ms a\nstep", f"{'tokens' if is_of_tokens else 'rows'}\na second"),
        "MFU",
    ]
    if is_wide:
        headers += ["bound\nby", "effort"]
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ["slice"] if is_stacked else ["slice", "layout"]:
        table.add_column(name, no_wrap=True)
    for name in headers:
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    for step in plan.steps:
        slice_name, layout, *cells = _cells(step, is_of_tokens)
        names = [slice_name, layout]
        if is_stacked:
            names = ["\n".join(names)]
        table.add_row(*map(Text, (*names, *cells[: len(headers)])))
    return table


def _sentences(plan: Plan) -> Iterator[str]:
    """What is said below a table."""
    said: dict[str, list[str]] = {}
    for step in plan.steps:
        text = " ".join(x for x in (step.error, step.advice) if x)
        if text:
            said.setdefault(text, []).append(f"{step.topology} {step.layout}")
    for text, names in said.items():
        is_of_all = len(names) == len(plan.steps) > 1
        yield f"{'all' if is_of_all else ', '.join(names)}: {text}"
    yield from (*_marks(plan), *plan.notes)


def _marks(plan: Plan) -> Iterator[str]:
    """What the signs in a table mean."""
    known = [s for s in plan.steps if s.bytes_in_all is not None]
    if any(not s.is_full_effort for s in known):
        yield (
            "~ compiled at low effort: as it is run, a step needs up to a "
            "tenth less or half more."
        )
    uneven = {
        (s.rows, s.num_replicas)
        for s in known
        if s.rows % max(s.num_replicas, 1)
    }
    for rows, replicas in sorted(uneven):
        yield (
            f"{rows:,} rows are no multiple of {replicas:,} replicas: they are "
            "computed as one batch, with more memory and time. Take a multiple."
        )
    counts = {s.blocks for s in known if s.blocks is not None}
    for few, many, count in sorted(counts):
        yield (
            f"Of the model's {count} equal blocks {few} and {many} were "
            "compiled; the rest is extrapolated."
        )
    if any(s.is_most_verified for s in known):
        yield "* compiled, and so was one row more, which does not fit."


def _cells(step: PlannedStep, is_of_tokens: bool) -> tuple[str, ...]:
    if step.error is not None:
        return (step.topology, step.layout, *["-"] * 9)
    rows = step.rows / max(step.num_replicas, 1)
    fits = {True: "yes", False: "no", None: "?"}[step.fits]
    memory = "?"
    if step.bytes_in_all is not None:
        memory = in_gb(step.bytes_in_all)
        memory = memory if step.is_full_effort else f"~{memory}"
    if step.limit_bytes is not None:
        memory += f"/{in_gb(step.limit_bytes)}"
    most = "-"
    if step.most_rows is not None:
        many = step.most_rows >= _MANY
        most = _large(step.most_rows) if many else str(step.most_rows)
    if step.is_most_verified:
        most += "*"
    time = bound = mfu = "-"
    if step.estimate is not None:
        time = _milliseconds(step.estimate.seconds)
        bounds = step.estimate.bounds
        bound = max(bounds, key=lambda name: bounds[name])
        if step.estimate.utilization is not None:
            mfu = f"{100 * step.estimate.utilization:.0f} %"
    rate = step.tokens_per_second if is_of_tokens else step.rows_per_second
    effort = "full" if step.is_full_effort else "low"
    if step.blocks is not None:
        effort += ", blocks"
    return (
        *(step.topology, step.layout, f"{rows:,.4g}", fits, memory, most),
        *(time, "-" if rate is None else _large(rate), mfu, bound, effort),
    )


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.2g}"


def _large(number: float) -> str:
    """A number with three digits: "2.52M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
