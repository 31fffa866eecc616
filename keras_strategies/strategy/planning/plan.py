"""`Plan`: what a step needs on each candidate slice, as a table and as JSON."""

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_strategies.strategy.planning.estimates import Estimate

BYTES_PER_GB = 1e9
_MANY = 10_000
_WIDE = 100
"""Columns of a terminal that has room for the whole table."""
NOTES = (
    "Bytes and collectives are the compiler's; times are estimates, and no "
    "step is faster than its bounds.",
)
KINDS = ("weights", "slots", "other", "gradients", "activations", "temporary")
"""What a device's memory is taken by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step needs on one slice, in one layout.

    Attributes:
      topology: The slice's name, or the devices' kind.
      layout: How the model lies on it: "replicated", "sharded:64", ...
      num_devices: Devices of the slice.
      num_replicas: Replicas that they are.
      rows: Of the global batch.
      limit_bytes: What a program may have on a device; None: unknown.
      bytes_in_all: What it needs on a device; None: unknown.
      memory: The same by kind: "weights", "slots", "other" (metrics, the
        batch and padding), "gradients" (at most; all at once), "activations"
        (what grows with the rows) and "temporary".
      counts: Collectives of a step, by kind.
      sent: Bytes of the arrays that they send, by kind.
      estimate: How long a step takes; None: unknown.
      tokens: Tokens of a row; None: rows are no sequences of them.
      most_rows: Rows on each replica that fit; None: unknown.
      is_most_verified: Whether they were compiled at full effort, and one row
        more on each replica, which does not fit.
      is_full_effort: Whether bytes are those of a program as it would be run;
        else of one that was compiled faster, and needs up to a quarter more.
      blocks: Of how many blocks the two models were that were compiled, and
        the model's own number; None: the model itself was.
      compile_seconds: How long compiling took, all in all.
      advice: What to do, in a sentence; "" for nothing.
      error: Why there are no figures, in a sentence; None: there are.
    """

    topology: str
    layout: str
    num_devices: int
    num_replicas: int
    rows: int
    limit_bytes: int | None
    bytes_in_all: float | None = None
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    estimate: Estimate | None = None
    tokens: int | None = None
    most_rows: int | None = None
    is_most_verified: bool = False
    is_full_effort: bool = False
    blocks: tuple[int, int, int] | None = None
    compile_seconds: float = 0.0
    advice: str = ""
    error: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None: unknown."""
        if self.error is not None:
            return False
        if self.bytes_in_all is None or self.limit_bytes is None:
            return None
        return self.bytes_in_all <= self.limit_bytes

    @property
    def rows_per_second(self) -> float | None:
        """Rows of the global batch that are trained on in a second."""
        if self.estimate is None or not self.estimate.seconds:
            return None
        return self.rows / self.estimate.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are trained on in a second."""
        if self.tokens is None or self.rows_per_second is None:
            return None
        return self.tokens * self.rows_per_second

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "PlannedStep":
        """The step of which `to_json` returned this."""
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {n: value for n, value in found.items() if n in names}
        if facts.get("estimate") is not None:
            facts["estimate"] = Estimate(**facts["estimate"])
        if facts.get("blocks") is not None:
            facts["blocks"] = tuple(facts["blocks"])
        return cls(**facts)

    def to_json(self) -> dict[str, Any]:
        """All of it, as `json.dumps` takes it."""
        return {
            **dataclasses.asdict(self),
            "fits": self.fits,
            "rows_per_second": self.rows_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What a step needs on each candidate: prints as a table.

    What `Strategy.plan` returns. Nothing of it has run.

    Attributes:
      steps: The candidates, in the order in which they were given.
      notes: What holds for all of them, in sentences.

    Example:
      ```python
      plan = strategy.plan(make_model, batch, topologies=["v5e:4x4"])
      print(plan)
      best = plan.fastest
      ```
    """

    steps: Sequence[PlannedStep]
    notes: Sequence[str] = ()

    @property
    def fastest(self) -> PlannedStep | None:
        """Of those that fit the one with most rows a second and chip."""
        fit = [s for s in self.steps if s.fits and s.rows_per_second]
        return max(
            fit,
            key=lambda s: (s.rows_per_second or 0) / s.num_devices,
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, as `json.dumps` takes it."""
        steps = [step.to_json() for step in self.steps]
        return {"version": 1, "steps": steps, "notes": list(self.notes)}

    def to_html(self) -> str:
        """A page with the table, and each candidate's memory as bars."""
        from keras_strategies.strategy.planning.page import page_of

        return page_of(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from _tables(self, options.max_width)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=120)
        console.print(self)
        lines = console.export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__


def _tables(plan: Plan, width: int) -> Iterator[Any]:
    is_wide = width >= _WIDE
    is_of_tokens = any(step.tokens is not None for step in plan.steps)
    headers = [
        *("rows", "fits", "GB a\ndevice", "most\nrows"),
        *("ms a\nstep", f"{'tokens' if is_of_tokens else 'rows'}\na second"),
        "MFU",
    ]
    if is_wide:
        headers += ["bound\nby", "effort"]
    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("slice", "layout"):
        table.add_column(name, no_wrap=True)
    for name in headers:
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    for step in plan.steps:
        cells = _cells(step, is_of_tokens)
        table.add_row(*map(Text, cells if is_wide else cells[:-2]))
    yield table
    said: dict[str, list[str]] = {}
    for step in plan.steps:
        text = " ".join(x for x in (step.error, step.advice) if x)
        if text:
            said.setdefault(text, []).append(f"{step.topology} {step.layout}")
    for text, names in said.items():
        is_of_all = len(names) == len(plan.steps) > 1
        yield Text(f"{'all' if is_of_all else ', '.join(names)}: {text}")
    yield from map(Text, (*_marks(plan), *plan.notes))


def _marks(plan: Plan) -> Iterator[str]:
    """What the signs in a table mean."""
    known = [s for s in plan.steps if s.bytes_in_all is not None]
    if any(not s.is_full_effort for s in known):
        yield (
            "~ compiled at low effort: as it is run, a step may need up to a "
            "quarter less."
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


def in_gb(size: float) -> str:
    """Bytes as GB, with three digits."""
    gigabytes = size / BYTES_PER_GB
    digits = 2 if gigabytes < 10 else 1
    return f"{gigabytes:.{digits}f}"
