"""Creates a self-contained HTML page from a plan."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from keras_strategies.planning.report.page_style import STYLE
from keras_strategies.planning.report.planned_step import (
    KINDS,
    PlannedStep,
    find_fastest,
    format_gb,
)

_LONGEST = 2.0
"""Maximum length of a bar as a multiple of the memory limit. Longer bars are
cut off."""
_MARGIN = 1.02
_REST = "unspecified"
_CODE = re.compile(r"`([^`]+)`")


def make_page(steps: Sequence[PlannedStep], notes: Sequence[str] = ()) -> str:
    """Returns the HTML of a plan's page.

    The page loads no other files and runs no scripts.

    Args:
      steps: The planned step of each candidate.
      notes: Sentences that apply to all candidates.
    """
    scales = _compute_scales(steps)
    cards = [
        _make_card(number, step, scales.get(step.limit_bytes, 0.0))
        for number, step in enumerate(steps, 1)
    ]
    summary = _summarize(steps)
    footer = "".join(f"<p>{_format_text(note)}</p>\n" for note in notes)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>keras-strategies plan: {escape(summary)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>keras-strategies plan</h1></header>
<main>
<section class="summary"><p>{escape(summary)}</p></section>
{_make_table(steps) if len(steps) > 1 else ""}
{"".join(cards)}
</main>
<footer>{footer}</footer>
</body>
</html>
"""


def _summarize(steps: Sequence[PlannedStep]) -> str:
    count = len(steps)
    if not count:
        return "There are no candidates."
    num_fit = sum(step.fits is True for step in steps)
    num_unknown = sum(step.fits is None for step in steps)
    are = "candidate fits" if count == 1 else "candidates fit"
    text = f"{num_fit} of {count} {are}"
    if num_unknown:
        text += f"; {num_unknown} unknown"
    best = find_fastest(steps)
    if best is None:
        return text + "."
    rate = (
        f"{best.topology} {best.layout}, with {_format_rate(best)} per second"
    )
    if count == 1:
        return f"{text}: {rate}."
    return f"{text}. The fastest per device is {rate}."


def _format_rate(step: PlannedStep) -> str:
    if step.tokens_per_second is not None:
        return f"{step.tokens_per_second:,.0f} tokens"
    if step.rows_per_second is not None:
        return f"{step.rows_per_second:,.0f} rows"
    return "-"


def _format_fits(step: PlannedStep) -> str:
    """Returns HTML: a colored word that tells whether a step fits."""
    kind, word = {
        True: ("yes", "fits"),
        False: ("no", "does not fit"),
        None: ("maybe", "unknown"),
    }[step.fits]
    if step.error is not None and step.bytes_in_all is None:
        word = "no result"
    return f'<span class="fits {kind}">{word}</span>'


def _format_memory(step: PlannedStep) -> str:
    size = "-" if step.bytes_in_all is None else format_gb(step.bytes_in_all)
    limit = step.limit_bytes
    return size if limit is None else f"{size} of {format_gb(limit)}"


def _make_table(steps: Sequence[PlannedStep]) -> str:
    rows = []
    for number, step in enumerate(steps, 1):
        time, mfu = "-", "-"
        if step.estimate is not None:
            time = _format_ms(step.estimate.seconds)
            if step.estimate.utilization is not None:
                mfu = f"{100 * step.estimate.utilization:.0f} %"
        rows.append(
            f'<tr><th scope="row"><a href="#c{number}">'
            f"{escape(step.topology)}</a> <span>{_format_layout(step)}</span>"
            f"</th><td>{_format_fits(step)}</td>"
            f'<td class="less">{_format_memory(step)}</td><td>{time}</td>'
            f'<td class="less">{_format_rate(step)}</td>'
            f'<td class="less">{mfu}</td></tr>\n'
        )
    return (
        '<section class="wide"><table><thead><tr><th scope="col">Candidate</th>'
        '<th scope="col">Fits</th><th scope="col" class="less">GB of a '
        'device</th><th scope="col">ms a step</th><th scope="col" '
        'class="less">a second</th><th scope="col" class="less">MFU</th></tr>'
        f"</thead><tbody>\n{''.join(rows)}</tbody></table></section>"
    )


def _make_card(number: int, step: PlannedStep, scale: float) -> str:
    remarks = ""
    if step.error is not None:
        remarks += _make_paragraph("no error", step.error)
    if step.advice:
        remarks += _make_paragraph("advice", step.advice)
    facts = "".join(
        f"<dt>{name}</dt><dd>{text}</dd>\n" for name, text in _iter_facts(step)
    )
    return (
        f'<section id="c{number}"><div class="head"><h2>'
        f"{escape(step.topology)} <span>{_format_layout(step)}</span></h2>"
        f"{_format_fits(step)}</div>\n{remarks}"
        f"{_draw_memory(step, scale)}{_draw_times(step)}<dl>{facts}</dl>"
        "</section>\n"
    )


def _make_paragraph(kind: str, text: str) -> str:
    return f'<p class="remark {kind}"><span>{_format_text(text)}</span></p>\n'


def _iter_facts(step: PlannedStep) -> Iterator[tuple[str, str]]:
    """Yields (name, text) for each property of a step that the page shows."""
    replicas = max(step.num_replicas, 1)
    yield (
        "Devices",
        f"{step.num_devices:,}, in {_format_count(replicas, 'replica')}",
    )
    rows = step.rows / replicas
    if step.rows:
        yield "Rows of a step", f"{step.rows:,}, {rows:,.6g} on each replica"
    if step.most_rows is not None:
        how = "estimated"
        if step.is_most_verified:
            how = "verified by compiling: one more does not fit"
        yield "Most rows", f"{step.most_rows:,} on each replica ({how})"
    if step.rows_per_second is not None:
        rate = _format_rate(step)
        if step.tokens_per_second is not None:
            rate += f", {step.rows_per_second:,.6g} rows"
        yield "A second", rate
    if step.estimate is not None and step.estimate.utilization is not None:
        mfu = f"{100 * step.estimate.utilization:.0f} %"
        most = step.estimate.most_utilization
        if most is not None:
            mfu += f" ({100 * most:.0f} % at the largest bound's speed)"
        yield "MFU", mfu
    # If a program does not fit, the compiler may not report its collectives.
    if step.bytes_in_all is not None and (step.counts or step.fits):
        yield "Collectives", "<br>".join(_iter_collectives(step)) or "none"
    if step.error is None:
        yield "Compiled", escape(_describe_effort(step))


def _iter_collectives(step: PlannedStep) -> Iterable[str]:
    for kind, count in step.counts.items():
        sent = _format_size(step.sent.get(kind, 0.0))
        yield f"{count:,} {escape(kind)}, {sent} in total"


def _describe_effort(step: PlannedStep) -> str:
    text = "at full effort, as for training"
    if not step.is_full_effort:
        text = (
            "at low effort; at full effort, the step may need up to 20 % less "
            "or 50 % more memory"
        )
    if step.blocks is not None:
        few, many, count = step.blocks
        text += (
            f"; extrapolated to {count} equal blocks from models with {few} "
            f"and {many} blocks"
        )
    if step.compile_seconds:
        text += f"; in {step.compile_seconds:,.1f}\N{NO-BREAK SPACE}s"
    return text


def _compute_scales(steps: Sequence[PlannedStep]) -> Mapping[int | None, float]:
    """Returns how many bytes a full-width bar stands for, by memory limit."""
    scales: dict[int | None, float] = {}
    for step in steps:
        size, limit = step.bytes_in_all or 0.0, step.limit_bytes
        if limit is not None:
            size = max(min(size, _LONGEST * limit), limit)
        scales[limit] = max(scales.get(limit, 0.0), size * _MARGIN)
    return scales


def _list_parts(step: PlannedStep) -> list[tuple[str, str, float]]:
    """Returns the name, CSS class and bytes of each category of memory."""
    sizes = [(kind, kind, step.memory.get(kind, 0.0)) for kind in KINDS]
    rest = (step.bytes_in_all or 0.0) - sum(size for _, _, size in sizes)
    if rest > 0.01 * (step.bytes_in_all or 0.0):
        sizes.append((_REST, "rest", rest))
    return [part for part in sizes if part[2] > 0]


def _draw_memory(step: PlannedStep, scale: float) -> str:
    if step.bytes_in_all is None or not scale:
        return ""
    limit, drawn, at = step.limit_bytes, [], 0.0
    parts = _list_parts(step)
    for name, kind, size in parts:
        start, at = at, at + size
        left, right = (100 * min(x / scale, 1) for x in (start, at))
        drawn.append(
            f'<rect class="part {kind}" x="{left:.2f}%" y="20" height="24" '
            f'width="{right - left:.2f}%"><title>{name}: {_format_size(size)}'
            "</title></rect>"
        )
    if at > scale:
        drawn.append(
            '<text class="cut" x="99.5%" y="38" text-anchor="end">»</text>'
        )
    if limit is not None:
        x = f"{100 * limit / scale:.2f}%"
        anchor = "end" if limit > scale / 2 else "middle"
        drawn.append(
            f'<line class="limit" x1="{x}" x2="{x}" y1="16" y2="48"/>'
            f'<text x="{x}" y="12" text-anchor="{anchor}">limit '
            f"{format_gb(limit)} GB</text>"
        )
    return (
        "<h3>Memory of a device</h3>\n"
        f'<svg height="50" role="img" aria-label="{_format_memory(step)} GB">'
        '<rect class="box" y="20" width="100%" height="24"/>'
        f"{''.join(drawn)}</svg>\n"
        f'<ul class="kinds">{"".join(_draw_legend(step, parts))}</ul>\n'
    )


def _draw_legend(
    step: PlannedStep, parts: Sequence[tuple[str, str, float]]
) -> Iterator[str]:
    for name, kind, size in parts:
        yield (
            f'<li><svg aria-hidden="true"><rect class="{kind}" width="100%" '
            f'height="100%"/></svg>{name} {_format_size(size)}</li>'
        )
    yield f"<li><b>{_format_memory(step)} GB</b></li>"


def _draw_times(step: PlannedStep) -> str:
    """Returns bars (HTML) for a step's estimated time and its bounds."""
    if step.estimate is None:
        return ""
    bounds = step.estimate.bounds
    largest = max(bounds, key=lambda name: bounds[name])
    longest = max(step.estimate.seconds, *bounds.values())
    rows = []
    for name, seconds in {"step": step.estimate.seconds, **bounds}.items():
        width = 100 * seconds / longest if longest else 0.0
        most = ' class="most"' if name in ("step", largest) else ""
        rows.append(
            f'<span{most}>{name}</span><svg height="12" aria-hidden="true">'
            f'<rect class="time" width="{width:.2f}%" height="12" '
            f'fill-opacity="{1 if most else 0.6}"/></svg>'
            f"<b{most}>{_format_ms(seconds)} ms</b>\n"
        )
    return (
        "<h3>Time of a step and its bounds</h3>\n"
        f'<div class="times">{"".join(rows)}</div>\n'
    )


def _format_layout(step: PlannedStep) -> str:
    return escape(step.layout).replace("+", "+<wbr>")


def _format_size(size: float) -> str:
    """Formats a number of bytes with a suitable unit."""
    if size >= 1e7:
        return f"{format_gb(size)} GB"
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size:,.0f} bytes"


def _format_ms(seconds: float) -> str:
    return (
        f"{seconds * 1e3:,.1f}" if seconds >= 1e-2 else f"{seconds * 1e3:.2g}"
    )


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _format_text(text: str) -> str:
    """Converts text to HTML; parts in backticks become code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))
