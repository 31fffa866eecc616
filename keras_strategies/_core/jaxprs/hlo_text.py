"""Collectives in a compiled program's text: how many, and of how many bytes.

XLA's text (HLO) has an instruction a line. An asynchronous collective of a TPU
is there several times: in the computation that starts it, and in those that
it runs beside, which have its chain's number; it counts once.
"""

import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)
"""XLA's names of what devices do together."""

_LINE = re.compile(
    rf"^\s*(?:ROOT )?%?(\S+) = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\((.*)$",
    re.M,
)
_SHAPE = re.compile(r"\b([a-z]+)(\d*)(?:[a-z]\w*)?\[([\d,]*)\]")
_STARTED = re.compile(
    r"custom-call\(%?([^),]+)\), custom_call_target=\"AsyncCollectiveStart\""
)
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})")


def counts_of(text: str) -> dict[str, int]:
    """How many collectives of each kind; one in a loop counts once."""
    counts: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
    for kind, _ in _found(text):
        counts[kind] += 1
    return counts


def bytes_of(text: str) -> dict[str, int]:
    """Bytes of the whole arrays that are sent, of each kind.

    What is gathered, reduced or, before it is scattered, summed up: that of
    all devices that take part. One in a loop counts once.
    """
    sizes: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
    for kind, size in _found(text):
        sizes[kind] += size
    return sizes


def _found(text: str) -> Iterator[tuple[str, int]]:
    started = set(_STARTED.findall(text))
    for name, result, kind, start, rest in _LINE.findall(text):
        if "chain_id=" in rest and name not in started:
            continue
        sizes = [_bytes(*shape) for shape in _SHAPE.findall(result)]
        # What is started returns its operands, too.
        size = max(sizes, default=0) if start else sum(sizes)
        yield kind, size * _members(rest) if kind == "reduce-scatter" else size


def _bytes(kind: str, bits: str, dims: str) -> int:
    # A truth value, `pred`, takes a byte.
    width = 8 if kind == "pred" else int(bits or 0)
    return math.prod(int(d) for d in dims.split(",") if d) * width // 8


def _members(rest: str) -> int:
    """How many devices a collective's groups have."""
    found = _GROUPS.search(rest)
    if found is None:
        return 1
    size, members = found.groups()
    return int(size) if size else len(members.split(","))
