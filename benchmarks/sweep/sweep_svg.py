"""A heat map of ratios, as the text of an SVG."""

import math
from xml.sax.saxutils import escape

CELL_WIDTH, CELL_HEIGHT = 84, 18
LEFT, TOP = 230, 62
# A ratio of so much, or its inverse, has the full color.
MAX = 2.0
FASTER, EVEN, SLOWER = (49, 130, 189), (247, 247, 247), (203, 24, 29)


def heat_map(groups, heads, cells, title):
    """A picture of ratios: blue below 1, white at 1, red above.

    Args:
      groups: Values of each factor, by the factor's name: the rows.
      heads: Pairs of a model and a peer: the columns.
      cells: Ratios by (factor, value, head); absent ones stay empty.
      title: Stands above.
    """
    parts = [text(8, 18, title, size=14, weight="bold")]
    for index, (model, peer) in enumerate(heads):
        x = LEFT + (index + 0.5) * CELL_WIDTH
        parts.append(text(x, TOP - 20, model, anchor="middle"))
        parts.append(text(x, TOP - 6, f"/ {peer}", anchor="middle"))
    y = TOP
    for factor, values in groups.items():
        parts.append(text(8, y + 13, factor, weight="bold"))
        for value in values:
            parts.append(text(LEFT - 6, y + 13, value, anchor="end"))
            for index, head in enumerate(heads):
                ratio = cells.get((factor, value, head))
                if ratio is not None:
                    parts += cell(LEFT + index * CELL_WIDTH, y, ratio)
            y += CELL_HEIGHT
        y += 6
    width, height = LEFT + len(heads) * CELL_WIDTH + 8, y + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">\n'
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def cell(x, y, ratio):
    """A colored rectangle with its ratio written on it."""
    share = max(min(math.log(ratio) / math.log(MAX), 1), -1)
    ink = "white" if abs(share) > 0.7 else "black"
    middle = x + CELL_WIDTH / 2
    return [
        f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" '
        f'height="{CELL_HEIGHT - 2}" fill="{color(share)}"/>',
        text(middle, y + 12, f"{ratio:.2f}", anchor="middle", fill=ink),
    ]


def color(share):
    """Between blue (-1), white (0) and red (1)."""
    end = SLOWER if share > 0 else FASTER
    mixed = [
        round(even + (full - even) * abs(share))
        for even, full in zip(EVEN, end, strict=True)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def text(
    x, y, words, *, size=11, anchor="start", weight="normal", fill="black"
):
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(str(words))}</text>"
    )
