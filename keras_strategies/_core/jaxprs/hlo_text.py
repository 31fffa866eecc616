"""Counts collectives and their bytes in a program's text.

XLA's text (HLO) has one instruction per line. An asynchronous collective of a
TPU appears several times: in the computation that starts it, and in the
computations that overlap with it, which have the same chain id. It is counted
once.
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
"""XLA's names of the collectives that are counted."""

KERNELS = "splash_attention_"
"""The name scope of attention's kernels, before the number of products of two
entries that one matrix product of a kernel computes."""

_LINE = re.compile(
    rf"^\s*(?:ROOT )?%?(\S+) = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\((.*)$",
    re.M,
)
_SHAPE = re.compile(r"\b([a-z]+)(\d*)(?:[a-z]\w*)?\[([\d,]*)\]")
_STARTED = re.compile(
    r"custom-call\(%?([^),]+)\), custom_call_target=\"AsyncCollectiveStart\""
)
_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})")


def count_collectives(text: str) -> dict[str, int]:
    """Counts the collectives of each kind.

    A collective in a loop is counted once.
    """
    counts: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
    for kind, _ in _find_collectives(text):
        counts[kind] += 1
    return counts


def count_collective_bytes(text: str) -> dict[str, int]:
    """Returns the bytes of the arrays that collectives of each kind send.

    The size of the full array is counted, not the size of a shard. The full
    array is the result of an all-gather, the reduced array of an all-reduce, or
    the sum of a reduce-scatter before it is scattered. A collective in a loop
    is counted once.
    """
    sizes: dict[str, int] = dict.fromkeys(COLLECTIVES, 0)
    for kind, size in _find_collectives(text):
        sizes[kind] += size
    return sizes


def _find_collectives(text: str) -> Iterator[tuple[str, int]]:
    """Yields the kind and the bytes of each collective."""
    started = set(_STARTED.findall(text))
    for name, result, kind, start, rest in _LINE.findall(text):
        if "chain_id=" in rest and name not in started:
            continue
        sizes = [_bytes(*shape) for shape in _SHAPE.findall(result)]
        # A `-start` instruction also returns its operands.
        size = max(sizes, default=0) if start else sum(sizes)
        yield kind, size * _members(rest) if kind == "reduce-scatter" else size


def _bytes(kind: str, bits: str, dims: str) -> int:
    # A boolean (`pred`) takes a byte.
    width = 8 if kind == "pred" else int(bits or 0)
    return math.prod(int(d) for d in dims.split(",") if d) * width // 8


def _members(rest: str) -> int:
    """Returns the number of devices in each group of a collective."""
    match = _GROUPS.search(rest)
    if match is None:
        return 1
    size, members = match.groups()
    return int(size) if size else len(members.split(","))
