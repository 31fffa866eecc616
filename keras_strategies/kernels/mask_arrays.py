"""Recognizes what an array means that a step computes as attention's mask.

Layers compute masks as arrays: causal masks, windows, padding and the segments
of packed rows, combined by "and". The kernel needs their parts, not the array,
which has an entry for each pair of a query and a key. So the array's equations
are followed back to positions (`iota`) and to arrays that have no such pairs.
What is not understood stays an array: nothing is guessed.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Array
from keras_strategies.kernels.attention_mask import AttentionMask
from keras_strategies.kernels.mask_values import (
    KEYS,
    QUERIES,
    ROWS,
    Line,
    NotRecognized,
    Value,
    read_line,
)

_NEGATED = {
    **{"ge": "lt", "gt": "le", "eq": "ne"},
    **{"lt": "ge", "le": "gt", "ne": "eq"},
}
_SWAPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """Conditions that must all hold for a pair of a query and a key.

    Attributes:
      lines: Numbers that must not be negative.
      flags: Values that must be nonzero (True), or zero (False).
      equal: Pairs of values that must be equal.
      assumed: Values that the recognition takes for not negative.
    """

    lines: tuple[Line, ...] = ()
    flags: tuple[tuple[Value, bool], ...] = ()
    equal: tuple[tuple[Value, Value], ...] = ()
    assumed: tuple[Value, ...] = ()

    def __add__(self, other: "_Parts") -> "_Parts":
        names = (field.name for field in dataclasses.fields(self))
        return _Parts(
            **{n: getattr(self, n) + getattr(other, n) for n in names}
        )


def recognize_mask(
    array: Array, query: Array, key: Array
) -> tuple[AttentionMask, Array | None] | None:
    """Returns the mask that an array is, if that is recognized.

    Args:
      array: The mask, of shape (batch or 1, heads or 1, T, S).
      query: An array of shape (batch, T, heads, depth).
      key: An array of shape (batch, S, heads or a divisor of it, depth).

    Returns:
      The mask, and for which rows it is wrong, of shape (batch,); None if it is
      right for all. It is wrong if a padding mask of numbers has negative ones.
      The result is None if the array is not recognized.
    """
    shape = np.shape(array)
    if not len(shape) == query.ndim == key.ndim == 4:
        return None
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    pairs = list(zip(shape, sizes, strict=True))
    if not all(n in (1, size) for n, size in pairs):
        return None
    dims = tuple(dim if n > 1 else None for dim, n in enumerate(shape))
    try:
        parts = _find_parts(Value.of(array, dims, sizes), True)
        return _make_mask(parts, sizes)
    except NotRecognized:
        return None


def _find_parts(value: Value, is_true: bool) -> _Parts:
    """Returns the conditions for a value to be nonzero, or to be zero.

    Raises:
      NotRecognized: if the value is no such mask.
    """
    if not {QUERIES, KEYS} <= value.find_dims():
        return _read_flag(value, is_true)
    value = value.skip_moves()
    if value.equation is None:
        return _read_array(value, is_true)
    name = value.name
    if name in _NEGATED:
        return _compare(name if is_true else _NEGATED[name], *value.operands)
    rule = _RULES.get(name)
    if rule is None:
        raise NotRecognized
    return rule(value, is_true)


def _read_flag(value: Value, is_true: bool) -> _Parts:
    line = read_line(value)
    if line is None or line.steps:
        return _Parts(flags=((value, is_true),))
    if bool(line.offset) != is_true:
        raise NotRecognized  # Never true: no part of a mask is.
    return _Parts()


def _read_array(value: Value, is_true: bool) -> _Parts:
    """Reads an array that is known when the step is traced."""
    array = value.constant
    if array is None or value.find_dims() != {QUERIES, KEYS}:
        raise NotRecognized
    used = (np.asarray(array) != 0) == is_true
    used = value.with_dims(used, (QUERIES, KEYS))
    places, last = np.arange(len(used)), used.shape[1] - 1
    first, end = used.argmax(1), last - used[:, ::-1].argmax(1)
    left, right = int((places - first).max()), int((end - places).max())
    is_band = (first == (places - left).clip(0)).all()
    is_band &= (end == (places + right).clip(None, last)).all()
    if not is_band or not (used.sum(1) == end - first + 1).all():
        raise NotRecognized
    return _Parts(
        lines=(
            Line(steps={KEYS: 1, QUERIES: -1}, offset=left),
            Line(steps={KEYS: -1, QUERIES: 1}, offset=right),
        )
    )


def _join(*parts: tuple[Value, bool], is_true: bool) -> _Parts:
    """Returns the conditions for all parts to hold, or for one not to hold."""
    if is_true:
        found = (_find_parts(*part) for part in parts)
        return functools.reduce(operator.add, found)
    left = [(v, of) for v, of in parts if _read_constant(v) is None]
    numbers = [(_read_constant(v), of) for v, of in parts]
    is_false = any(n is not None and bool(n) != of for n, of in numbers)
    if is_false or len(left) != 1:
        raise NotRecognized
    ((value, of),) = left
    return _find_parts(value, not of)


def _read_constant(value: Value) -> float | None:
    line = read_line(value)
    return None if line is None or line.steps else line.offset


def _and(value: Value, is_true: bool) -> _Parts:
    if not all(map(_is_binary, value.operands)):
        raise NotRecognized
    return _join(*((v, True) for v in value.operands), is_true=is_true)


def _or(value: Value, is_true: bool) -> _Parts:
    if not all(map(_is_binary, value.operands)):
        raise NotRecognized
    return _join(*((v, False) for v in value.operands), is_true=not is_true)


def _not(value: Value, is_true: bool) -> _Parts:
    if value.dtype != jnp.bool_:
        raise NotRecognized
    return _find_parts(value.operands[0], not is_true)


def _multiply(value: Value, is_true: bool) -> _Parts:
    others = [v for v in value.operands if not _is_binary(v)]
    if len(others) > 1 or any(not _is_integer(v) for v in others):
        raise NotRecognized
    return _join(*((v, True) for v in value.operands), is_true=is_true)


def _minimum(value: Value, is_true: bool) -> _Parts:
    """Reads a minimum of 0 or 1 and a number, assumed not to be negative."""
    others = [v for v in value.operands if not _is_binary(v)]
    if any({QUERIES, KEYS} <= v.find_dims() for v in others):
        others = [v for v in others if not _is_not_negative(v)]
    if any({QUERIES, KEYS} <= v.find_dims() for v in others):
        raise NotRecognized
    found = _join(*((v, True) for v in value.operands), is_true=is_true)
    return found + _Parts(assumed=tuple(others))


def _cast(value: Value, is_true: bool) -> _Parts:
    (operand,) = value.operands
    is_kept = value.dtype == jnp.bool_ or _is_binary(operand)
    is_wide = _is_integer(operand) and (
        not _is_integer(value) or value.dtype.itemsize >= operand.dtype.itemsize
    )
    if not is_kept and not is_wide:
        raise NotRecognized
    return _find_parts(operand, is_true)


def _select(value: Value, is_true: bool) -> _Parts:
    which, no, yes = value.operands
    if which.dtype != jnp.bool_:
        raise NotRecognized
    # If one of the values is a number: "and" if it is 0, else "or".
    for other, number, is_which in ((yes, no, True), (no, yes, False)):
        constant = _read_constant(number)
        if constant is not None:
            if constant:
                parts = (which, is_which), (other, False)
                return _join(*parts, is_true=not is_true)
            return _join((which, is_which), (other, True), is_true=is_true)
    raise NotRecognized


_RULES: dict[str, Callable[[Value, bool], _Parts]] = {
    **{"and": _and, "or": _or, "max": _or, "not": _not, "mul": _multiply},
    **{"min": _minimum, "convert_element_type": _cast, "select_n": _select},
}


def _compare(name: str, one: Value, two: Value) -> _Parts:
    number = _read_constant(two)
    if number is None and _read_constant(one) is not None:
        return _compare(_SWAPPED.get(name, name), two, one)
    if number is not None and {QUERIES, KEYS} <= one.find_dims():
        compare: Any = getattr(operator, name)
        if _is_binary(one):
            if compare(0, number) != compare(1, number):
                return _find_parts(one, compare(1, number))
        elif number == 0 and name in ("eq", "ne"):
            return _find_parts(one, name == "ne")
    if name == "eq" and read_line(one) is None:
        return _compare_segments(one, two)
    lines = list(_compare_lines(name, read_line(one), read_line(two)))
    return _Parts(lines=tuple(lines))


def _compare_segments(one: Value, two: Value) -> _Parts:
    pair = (one, two) if KEYS in two.find_dims() else (two, one)
    sides = [v.find_dims() for v in pair]
    is_known = sides[0] <= {ROWS, QUERIES} and sides[1] <= {ROWS, KEYS}
    if not is_known or not all(_is_integer(v, 4) for v in pair):
        raise NotRecognized
    return _Parts(equal=(pair,))


def _compare_lines(
    name: str, one: Line | None, two: Line | None
) -> Iterator[Line]:
    """Yields the numbers that are not negative if a comparison is true."""
    if one is None or two is None:
        raise NotRecognized
    if one.is_absolute or two.is_absolute:
        if two.is_absolute:
            name, one, two = _SWAPPED.get(name, name), two, one
        if name not in ("lt", "le") or two.is_absolute:
            raise NotRecognized
        one = dataclasses.replace(one, is_absolute=False)
        yield from _compare_lines(name, one, two)
        one = one.times(-1)
    if name not in ("ge", "gt", "le", "lt", "eq"):
        raise NotRecognized
    rest = one.plus(two.times(-1))
    if name in ("ge", "gt", "eq"):
        yield rest.plus(Line(steps={}, offset=-int(name == "gt")))
    if name in ("le", "lt", "eq"):
        yield rest.times(-1).plus(Line(steps={}, offset=-int(name == "lt")))


def _is_integer(value: Value, size: int = 8) -> bool:
    is_number = jnp.issubdtype(value.dtype, jnp.integer)
    is_number |= value.dtype == jnp.bool_
    return bool(is_number) and value.dtype.itemsize <= size


def _is_binary(value: Value) -> bool:
    """Returns whether each number of a value is surely 0 or 1."""
    number = _read_constant(value)
    if value.dtype == jnp.bool_ or number in (0, 1):
        return True
    value = value.skip_moves()
    if value.name in ("min", "max", "mul", "and", "convert_element_type"):
        return all(map(_is_binary, value.operands))
    return value.name == "select_n" and all(map(_is_binary, value.operands[1:]))


def _is_not_negative(value: Value) -> bool:
    """Returns whether a value is a minimum that was checked already."""
    value = value.skip_moves()
    return value.name == "min" or (
        value.name == "convert_element_type"
        and _is_not_negative(value.operands[0])
    )


def _make_mask(
    parts: _Parts, sizes: tuple[int, ...]
) -> tuple[AttentionMask, Array | None]:
    lengths = {QUERIES: sizes[QUERIES], KEYS: sizes[KEYS]}
    limits: dict[int, int] = {}
    used: dict[int, list[Array]] = {QUERIES: [], KEYS: []}
    for line in parts.lines:
        _add_limit(line, lengths, limits, used)
    for value, is_true in parts.flags:
        dim = QUERIES if QUERIES in value.find_dims() else KEYS
        used[dim].append((value.compute_rows(dim) != 0) == is_true)
    if min(limits.values(), default=0) < 0 or len(parts.equal) > 1:
        raise NotRecognized
    segments = (None, None)
    for one, two in parts.equal:
        one, two = one.compute_rows(QUERIES), two.compute_rows(KEYS)
        segments = one.astype("int32"), two.astype("int32")
    wrong = [
        (
            value.compute_rows(KEYS if KEYS in value.find_dims() else QUERIES)
            < 0
        ).any(1)
        for value in parts.assumed
    ]
    left, right = limits.get(QUERIES, math.inf), limits.get(KEYS, math.inf)
    shape = {dim: (sizes[ROWS], lengths[dim]) for dim in lengths}
    flags = {
        dim: jnp.broadcast_to(functools.reduce(operator.and_, each), shape[dim])
        for dim, each in used.items()
        if each
    }
    mask = AttentionMask(
        left=None if left >= lengths[QUERIES] - 1 else int(left),
        right=None if right >= lengths[KEYS] - 1 else int(right),
        queries=flags.get(QUERIES),
        keys=flags.get(KEYS),
        query_segments=segments[0],
        key_segments=segments[1],
    )
    return mask, functools.reduce(operator.or_, wrong) if wrong else None


def _add_limit(
    line: Line,
    lengths: dict[int, int],
    limits: dict[int, int],
    used: dict[int, list[Any]],
) -> None:
    """Adds the condition that a line is not negative."""
    step, back = line.steps.get(KEYS, 0), line.steps.get(QUERIES, 0)
    if line.steps.keys() - lengths.keys():
        raise NotRecognized
    if step and back:
        if step != -back:
            raise NotRecognized
        dim, limit = QUERIES if step > 0 else KEYS, line.offset // abs(step)
        limits[dim] = min(limits.get(dim, limit), limit)
    elif step or back:
        dim = KEYS if step else QUERIES
        places = np.arange(lengths[dim])
        used[dim].append(jnp.asarray((step + back) * places + line.offset >= 0))
    elif line.offset < 0:
        raise NotRecognized
