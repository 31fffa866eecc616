"""Counts collectives and their bytes in a program's text.

XLA's text (HLO) has one instruction per line. An asynchronous collective of a
TPU appears several times: in the computation that starts it, and in the
computations that overlap with it, which have the same chain id. It is counted
once.
"""

import functools
import math
import re
from collections.abc import Iterator

import numpy as np

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
_LISTED = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}"
)
_TILED = re.compile(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_OF_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))?"
    r" \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


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


def count_bytes(opcode: str, result: str, attributes: str) -> int:
    """Returns the bytes of the full arrays that a collective sends.

    Several arrays that XLA combined are all counted.

    Args:
      opcode: The collective, such as "all-gather" or "all-gather-start".
      result: The text of its result's shape.
      attributes: The text after its operands.
    """
    kind = opcode.removesuffix("-start")
    parts = _split_tuple(result)
    if kind != opcode and kind != "all-reduce" and len(parts) > 1:
        # Its operands, its results and, for some kinds, buffers.
        return _count_bytes(parts[0 if kind == "reduce-scatter" else 1])
    size = _count_bytes(result)
    groups = parse_groups(attributes) if kind == "reduce-scatter" else ()
    return size * len(groups[0]) if groups else size


def parse_groups(attributes: str) -> Groups:
    """Parses the groups of devices in a collective's attributes.

    XLA has three notations: lists of numbers; the rows of a transposed array of
    all numbers; and axes of a mesh. For a collective-permute, the groups are
    the pairs of a source and a target.

    Args:
      attributes: The text after the collective's operands.

    Returns:
      The groups, or () if the text contains none.
    """
    tiled = _TILED.search(attributes)
    if tiled is not None:
        count, members, dims, order = tiled.groups()
        numbers = _make_numbers(dims, order).reshape(int(count), int(members))
        return _list_rows(numbers)
    of_mesh = _OF_MESH.search(attributes)
    if of_mesh is not None:
        return _parse_mesh(*of_mesh.groups())
    listed = _LISTED.search(attributes)
    if listed is None:
        return ()
    texts = re.findall(r"\{([\d,]+)\}", listed[1])
    return tuple(map(_parse_numbers, texts))


@functools.lru_cache(maxsize=256)
def _parse_mesh(
    mesh: str, dims: str | None, order: str | None, ids: str | None, axes: str
) -> Groups:
    """Parses groups that are the devices along axes of a mesh.

    Args:
      mesh: The axes of the mesh, such as "'x'=4,'y'=2".
      dims: If the devices are those of a transposed array: its sizes.
      order: The order of its dimensions.
      ids: The devices, if they are listed.
      axes: The axes of the groups, such as "'x'". An axis of 8 of which only a
        part of size 2 that follows one of size 4 is meant: "'x':(4)2".
    """
    sizes = {name: int(n) for name, n, _, _ in _AXIS.findall(mesh)}
    shape, names = tuple(sizes.values()), tuple(sizes)
    numbers = _make_numbers(dims or str(math.prod(shape)), order)
    if ids:
        numbers = np.array(_parse_numbers(ids))
    # The place in the mesh of the first device of each device's group.
    firsts, members = np.indices(shape), 1
    for name, _, before, part in _AXIS.findall(axes):
        size = int(part or sizes[name])
        inner = sizes[name] // size // int(before or 1)
        place = firsts[names.index(name)]
        place -= place // inner % size * inner
        members *= size
    keys = np.ravel_multi_index(tuple(firsts), shape).ravel()
    grouped = numbers.ravel()[np.argsort(keys, kind="stable")]
    return _list_rows(grouped.reshape(-1, members))


def _make_numbers(dims: str, order: str | None) -> np.ndarray:
    """Returns the numbers from 0 in an array of some sizes, transposed."""
    sizes = _parse_numbers(dims)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_parse_numbers(order)) if order else numbers


def _list_rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _find_collectives(text: str) -> Iterator[tuple[str, int]]:
    """Yields the kind and the bytes of each collective."""
    started = set(_STARTED.findall(text))
    for name, result, kind, start, rest in _LINE.findall(text):
        if "chain_id=" not in rest or name in started:
            yield kind, count_bytes(kind + start, result, rest)


def _count_bytes(shapes: str) -> int:
    """Returns the bytes of all arrays in a text."""
    total = 0
    for kind, bits, dims in _SHAPE.findall(shapes):
        # A boolean (`pred`) takes a byte.
        width = 8 if kind == "pred" else int(bits or 0)
        total += math.prod(_parse_numbers(dims)) * width // 8
    return total


def _split_tuple(shape: str) -> list[str]:
    """Returns the elements of a tuple, or [] for an array."""
    if not shape.startswith("("):
        return []
    elements, depth, start = list[str](), 0, 1
    for match in re.finditer(r"[(){}\[\],]", shape):
        depth += {"(": 1, "{": 1, "[": 1, ",": 0}.get(match[0], -1)
        if (match[0] == "," and depth == 1) or not depth:
            elements.append(shape[start : match.start()])
            start = match.end()
    return elements
