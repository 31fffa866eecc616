"""`Plan`: a step's memory and time on devices, as table, HTML and JSON."""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

import rich.box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_strategies.planning.report.planned_step import (
    PlannedStep,
    format_gb,
)

_MANY = 10_000
_WIDE = 100
"""The width of a terminal, in characters, that fits the whole table."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The memory and time of a step on each candidate; `print` shows a table.

    This is the result of `Strategy.plan`. A candidate is a topology (a TPU
    slice or some GPUs) with a layout of the model's variables. The programs
    were compiled but not run.

    Attributes:
      steps: One planned step per candidate, in the requested order.
      notes: Sentences that apply to all candidates.

    Example:
      ```python
      plan = strategy.plan(make_model, (x, y))
      print(plan)
      best = plan.fastest
      ```
    """

    steps: Sequence[PlannedStep]
    notes: Sequence[str] = ()

    @property
    def fastest(self) -> PlannedStep | None:
        """The step that fits and has the most rows/s per device, or None."""
        fit = [(s.rows_per_second, s) for s in self.steps if s.fits]
        rates = [(rate / s.num_devices, s) for rate, s in fit if rate]
        return max(rates, key=lambda pair: pair[0], default=(0.0, None))[1]

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as a dict that `json.dumps` accepts."""
        steps = [step.to_json() for step in self.steps]
        return {"version": 1, "steps": steps, "notes": list(self.notes)}

    def to_html(self) -> str:
        """Returns an HTML page that shows each candidate's memory as a bar."""
        # Imports modules of rich that Keras does not.
        from keras_strategies.planning.report.page import make_page

        return make_page(self, self.steps)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield _make_table(self, is_wide=options.max_width >= _WIDE)
        yield from map(Text, _iter_sentences(self))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=120)
        console.print(self)
        lines = console.export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__


def _make_table(plan: Plan, is_wide: bool) -> Table:
    is_of_tokens = any(step.tokens is not None for step in plan.steps)
    headers = [
        *("rows", "fits", "GB a\ndevice", "most\nrows"),
        *("ms a\nstep", f"{'tokens' if is_of_tokens else 'rows'}\na second"),
        "MFU",
    ]
    if is_wide:
        headers += ["bound\nby", "effort"]
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("topology", "layout"):
        table.add_column(name, overflow="fold")
    for name in headers:
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    for step in plan.steps:
        cells = _format_cells(step, is_of_tokens)[: len(headers)]
        table.add_row(*map(Text, (step.topology, step.layout, *cells)))
    return table


def _iter_sentences(plan: Plan) -> Iterator[str]:
    """Yields the sentences that are printed below a plan's table."""
    names_by_text: dict[str, list[str]] = {}
    for step in plan.steps:
        text = " ".join(x for x in (step.error, step.advice) if x)
        if text:
            name = f"{step.topology} {step.layout}"
            names_by_text.setdefault(text, []).append(name)
    for text, names in names_by_text.items():
        is_of_all = len(names) == len(plan.steps) > 1
        yield f"{'all' if is_of_all else ', '.join(names)}: {text}"
    yield from (*_iter_marks(plan), *plan.notes)


def _iter_marks(plan: Plan) -> Iterator[str]:
    """Yields explanations of signs in a plan's table, such as "~"."""
    known = [s for s in plan.steps if s.bytes_in_all is not None]
    if any(not s.is_full_effort for s in known):
        yield (
            "~ compiled at low effort. At full effort, as for training, a step "
            "may need up to 20 % less or 50 % more memory."
        )
    uneven = {
        (s.rows, s.num_replicas)
        for s in known
        if s.rows % max(s.num_replicas, 1)
    }
    for rows, replicas in sorted(uneven):
        yield (
            f"{rows:,} rows are not a multiple of {replicas:,} replicas, so "
            "the step computes them as one global batch, which needs more "
            "memory and time. Use a number of rows that all replicas can share "
            "evenly."
        )


def _format_cells(step: PlannedStep, is_of_tokens: bool) -> tuple[str, ...]:
    if step.error is not None:
        return ("-",) * 9
    rows = step.rows / max(step.num_replicas, 1)
    each = f"{rows:,.0f}" if rows >= _MANY else f"{rows:,.4g}"
    fits = {True: "yes", False: "no", None: "?"}[step.fits]
    memory = "?"
    if step.bytes_in_all is not None:
        memory = format_gb(step.bytes_in_all)
        memory = memory if step.is_full_effort else f"~{memory}"
    if step.limit_bytes is not None:
        memory += f"/{format_gb(step.limit_bytes)}"
    maximum = "-"
    if step.max_rows is not None:
        many = step.max_rows >= _MANY
        maximum = _format_large(step.max_rows) if many else str(step.max_rows)
    time = bound = mfu = "-"
    if step.estimate is not None:
        time = _format_ms(step.estimate.seconds)
        bounds = step.estimate.bounds
        bound = max(bounds, key=lambda name: bounds[name])
        if step.estimate.utilization is not None:
            mfu = f"{100 * step.estimate.utilization:.0f} %"
    rate = step.tokens_per_second if is_of_tokens else step.rows_per_second
    effort = "full" if step.is_full_effort else "low"
    rate = "-" if rate is None else _format_large(rate)
    return each, fits, memory, maximum, time, rate, mfu, bound, effort


def _format_ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.2g}"


def _format_large(number: float) -> str:
    """Returns a number with three digits, such as "2.52M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
