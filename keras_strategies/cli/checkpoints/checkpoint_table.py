"""A directory of checkpoints on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_strategies.cli.checkpoints.checkpoint_list import (
    Entry,
    Listing,
    State,
)
from keras_strategies.cluster.untrusted import printable

_MARKS = {
    State.VERIFIED: ("+", "green"),
    State.SAME_SIZES: ("+", "green"),
    State.DAMAGED: ("x", "bold red"),
    State.UNDER_WAY: ("-", "cyan"),
}
_WIDEST = 120
_GAP = 2
_UNITS = (
    (365 * 86400, "year"),
    (86400, "day"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
)
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def print_listing(
    listing: Listing, now: float, console: Console | None = None
) -> None:
    """Prints what a directory holds, then what is wrong, then a summary.

    Args:
      listing: What was found.
      now: The time, in seconds since 1970 (UTC).
      console: Where to print; None for stdout.
    """
    if console is None:
        console = Console(highlight=False)
        console.width = min(console.width, _WIDEST)
    console.print(
        Text(printable(listing.directory), style="bold", overflow="fold")
    )
    parts = (
        _checkpoints(listing, now, console.width),
        _contents(listing),
        _left_behind(listing),
    )
    for part in parts:
        if part is not None:
            console.print(Padding(part, (0, 0, 1, _GAP)))
    for entry in listing.damaged:
        text = f"Step {entry.step} is damaged: {entry.fault}."
        console.print(_line(*_MARKS[State.DAMAGED], text))
    if listing.writer is not None:
        console.print(_line("-", "cyan", f"Written to by {listing.writer}."))
    console.print(_summary(listing))


def size_text(num_bytes: int) -> str:
    """A size for people: "1.2 MB"."""
    for size, unit in _SIZES:
        # 999.96 kB would be written as 1000.0 kB.
        if num_bytes >= size * 0.99995:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def age_text(seconds: float) -> str:
    """An age for people: "3 h"."""
    for size, unit in _UNITS:
        count = int(seconds // size)
        if count > 0:
            is_word = unit in ("year", "day")
            return _counted(count, unit) if is_word else f"{count} {unit}"
    # Clocks of machines differ a little.
    return "0 s" if seconds > -60 else "in the future"


def value_text(value: Any) -> str:
    """A metric's value for people, in four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


def _checkpoints(
    listing: Listing, now: float, width: int
) -> RenderableType | None:
    """The table of checkpoints, with a column for each metric if they fit."""
    entries = listing.entries
    if not entries:
        return None
    columns = _columns(entries, now)
    whole = columns | _metrics(entries)
    if whole == columns or _width(whole) <= width:
        return _tabled(entries, whole)
    logged = tuple(entry for entry in entries if entry.logs)
    steps = {"step": [str(entry.step) for entry in logged]}
    by_step = steps | _metrics(logged)
    if _width(by_step) > width:
        by_step = steps | {"metrics": _in_words(logged)}
    return Group(_tabled(entries, columns), Text(), _tabled(logged, by_step))


def _columns(entries: tuple[Entry, ...], now: float) -> dict[str, list[str]]:
    """What every checkpoint has, by what is above it."""
    times = [entry.created for entry in entries]
    epochs = [entry.facts.get("epoch") for entry in entries]
    return {
        "step": [str(entry.step) for entry in entries],
        "size": [size_text(entry.num_bytes) for entry in entries],
        "age": ["" if t is None else age_text(now - t) for t in times],
        "state": [f"{_MARKS[e.state][0]} {e.state.value}" for e in entries],
        "epochs": ["" if e is None else value_text(e) for e in epochs],
    }


def _metrics(entries: tuple[Entry, ...]) -> dict[str, list[str]]:
    """The metrics of all checkpoints, in the order in which they come."""
    names = dict.fromkeys(name for entry in entries for name in entry.logs)
    return {
        printable(name): [value_text(e.logs.get(name, "")) for e in entries]
        for name in names
    }


def _in_words(entries: tuple[Entry, ...]) -> list[str]:
    # No line ends within a metric.
    return [
        ", ".join(
            f"{printable(name)}\N{NO-BREAK SPACE}{value_text(value)}"
            for name, value in entry.logs.items()
        )
        for entry in entries
    ]


def _width(columns: Mapping[str, list[str]]) -> int:
    widths = [max(map(len, [name, *cells])) for name, cells in columns.items()]
    return _GAP + sum(widths) + _GAP * (len(widths) - 1)


def _tabled(
    entries: tuple[Entry, ...], columns: Mapping[str, list[str]]
) -> Table:
    table = _table()
    for name in columns:
        is_text = name in ("state", "metrics")
        table.add_column(
            Text(name, style="dim"),
            justify="left" if is_text else "right",
            no_wrap=name != "metrics",
            overflow="fold",
        )
    for entry, *cells in zip(entries, *columns.values(), strict=True):
        style = _MARKS[entry.state][1]
        texts = [
            Text(cell, style=style if name == "state" else "")
            for name, cell in zip(columns, cells, strict=True)
        ]
        table.add_row(*texts)
    return table


def _contents(listing: Listing) -> RenderableType | None:
    """What checkpoints hold: said once for all that hold the same."""
    kinds: dict[str, tuple[Entry, list[int]]] = {}
    for entry in listing.entries:
        if entry.contents:
            key = repr(sorted(entry.contents.items()))
            kinds.setdefault(key, (entry, []))[1].append(entry.step)
    if not kinds:
        return None
    parts: list[RenderableType] = []
    for entry, steps in kinds.values():
        if len(kinds) == 1:
            head = "Each holds" if len(steps) > 1 else "It holds"
        else:
            verb = "hold" if len(steps) > 1 else "holds"
            head = f"{_steps(steps)} {verb}"
        rows = [
            (
                printable(group),
                _counted(contents.num_arrays, "array"),
                _counted(contents.num_values, "value"),
            )
            for group, contents in entry.contents.items()
        ]
        parts.append(_listed(head, rows, ["left", "right", "right"]))
    return Group(*parts)


def _steps(steps: list[int]) -> str:
    few = steps if len(steps) < 5 else [steps[0], steps[1], "...", steps[-1]]
    return f"Step{'s' * (len(steps) > 1)} {', '.join(map(str, few))}"


def _left_behind(listing: Listing) -> RenderableType | None:
    if not listing.left_behind:
        return None
    rows = [
        (left.name, size_text(left.num_bytes), left.reason)
        for left in listing.left_behind
    ]
    return _listed("Left behind", rows, ["left", "right", "left"])


def _line(mark: str, style: str, text: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1, style=style)
    table.add_column(overflow="fold")
    table.add_row(mark, Text(printable(text)))
    return table


def _summary(listing: Listing) -> Text:
    count, wrong = len(listing.entries), len(listing.damaged)
    if not count:
        size = f", {size_text(listing.num_bytes)}" * bool(listing.num_bytes)
        return Text(f"No checkpoints{size}.", style="yellow")
    damaged = f", {wrong} damaged" if wrong else ""
    return Text(
        f"{_counted(count, 'checkpoint')}{damaged}, "
        f"{size_text(listing.num_bytes)}.",
        style="bold red" if wrong else "green",
    )


def _table(*, show_header: bool = True) -> Table:
    return Table(
        box=None,
        show_header=show_header,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
        header_style="",
    )


def _listed(
    head: str, rows: Iterable[Sequence[str]], sides: Sequence[JustifyMethod]
) -> RenderableType:
    """Rows below a line; numbers stand to the right, and are not broken."""
    table = _table(show_header=False)
    for side in sides:
        is_text = side == "left"
        overflow = "fold" if is_text else "ellipsis"
        table.add_column(justify=side, no_wrap=not is_text, overflow=overflow)
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(Text(head, style="dim"), Padding(table, (0, 0, 0, _GAP)))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
