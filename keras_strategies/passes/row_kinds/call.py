"""An equation with the `Kind` of each operand, and helpers for the rules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.passes.row_kinds.kinds import (
    PLAIN,
    Kind,
    is_constant,
    join,
    join_constants,
    make_mixed,
    make_uniform,
    may_count,
    move,
)


class Different(Exception):
    """Raised if the two traces do not have the same equations."""


class RowsMixed(Exception):
    """Ends a rule whose results mix rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An equation with the `Kind` of each of its operands.

    Attributes:
      equation: The equation.
      retraced: The same equation in a trace with more rows, or None if there is
        only one trace.
      kinds: The `Kind` of each operand.
      num_rows: The number of rows of the batch.
      ratio: The number of rows of the other trace, divided by `num_rows`.
    """

    equation: Any
    retraced: Any
    kinds: list[Kind]
    num_rows: int
    ratio: float

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.equation.params

    @property
    def equations(self) -> list[Any]:
        """The equation in each of the traces."""
        return [e for e in (self.equation, self.retraced) if e is not None]

    def shapes(self, k: int = 0) -> list[tuple[int, ...]]:
        """Returns the shape of operand `k` in each of the traces."""
        return [equation.invars[k].aval.shape for equation in self.equations]

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """Returns the shape of operand `k`."""
        return self.equation.invars[k].aval.shape

    def out_shape(self, k: int = 0) -> tuple[int, ...]:
        """Returns the shape of result `k`."""
        return self.equation.outvars[k].aval.shape

    def grown_dims(self, k: int = 0) -> list[int]:
        """Returns operand `k`'s dimensions whose size differs when retraced."""
        return _changing(self.shapes(k))

    def out_grown_dims(self, k: int = 0) -> list[int]:
        """Returns result `k`'s dimensions whose size differs when retraced."""
        return _changing([e.outvars[k].aval.shape for e in self.equations])

    def make_mixed(self) -> Kind:
        """Returns the `Kind` of a result in which this equation mixes rows."""
        return make_mixed(self.equation)

    def require(self, is_separate: bool) -> None:
        """Raises RowsMixed unless the equation keeps rows separate, or sums."""
        if not is_separate:
            raise RowsMixed

    def is_aligned(self, k: int, axis: int, outer: int | None = None) -> bool:
        """Returns whether operand `k` has rows at `axis`, or is equal there.

        Args:
          k: The operand.
          axis: The dimension.
          outer: The number of blocks of rows (`Kind.outer`); None for any.
        """
        kind, shape = self.kinds[k], self.shape(k)
        if kind.is_const:
            return axis >= len(shape) or kind.is_flat(axis, shape[axis])
        is_there = kind.is_rows and kind.axis == axis
        return is_there and outer in (None, kind.outer)


def _changing(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Returns the dimensions whose size differs between the traces."""
    if len(set(map(len, shapes))) > 1:
        raise Different
    columns = enumerate(zip(*shapes, strict=True))
    return [dim for dim, sizes in columns if len(set(sizes)) > 1]


def other_dims(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Returns all dimensions of an array that are not in `dims`."""
    return [dim for dim in range(len(shape)) if dim not in dims]


def join_plain(kinds: Sequence[Kind]) -> Kind:
    """Returns the `Kind` of a value that is computed only from constants."""
    is_random = any(kind.is_random for kind in kinds)
    power = 0.0 if all(map(is_constant, kinds)) else math.nan
    return PLAIN.but(is_random=is_random, power=power)


def scale_power(
    power: float | None, by: Kind, call: Call, *, inverse: bool = False
) -> float | None:
    """Returns the exponent of the product of a value and a constant.

    A value with the exponent p scales as num_rows**p. With `inverse`, the value
    is divided by the constant.
    """
    if power is None:
        return power
    change = by.power_in(call.ratio)
    if change is None:
        value = by.values[0] if by.values else 1.0
        return None if may_count(value, call.num_rows) else power
    return power - change if inverse else power + change


def add_powers(kinds: Sequence[Kind]) -> float | None:
    """Adds the exponents of two factors; None if one of them is unknown."""
    powers = [kind.power for kind in kinds]
    return None if None in powers else sum(p or 0.0 for p in powers)


def join_all(kinds: Sequence[Kind], call: Call) -> Kind:
    """Returns the `Kind` of a result that may equal any of the operands."""
    shape, why = call.out_shape(), call.equation
    return functools.reduce(lambda a, b: join(a, b, shape, why), kinds)


def move_dims(
    call: Call,
    to: Callable[[int], int | None],
    kind: Kind | None = None,
    out: int = 0,
) -> Kind:
    """Returns the `Kind` of a result whose dimensions are moved or removed.

    Args:
      call: The equation.
      to: A function that maps a dimension of the operand to the dimension of
        the result, or to None if it is removed.
      kind: The operand's kind. None for the kind of operand 0.
      out: The index of the result.
    """
    kind = call.kinds[0] if kind is None else kind
    if kind.values is not None:
        return make_uniform(kind.values, call.out_shape(out))
    return move(kind, to, call.equation)


def drop_dims(
    call: Call, dims: Sequence[int], kind: Kind | None = None, out: int = 0
) -> Kind:
    """Returns the `Kind` of a result without some of operand 0's dimensions."""
    kept = other_dims(call.shape(), dims)
    places = {axis: place for place, axis in enumerate(kept)}
    return move_dims(call, places.get, kind, out)


def kind_of_entries(call: Call) -> Kind:
    """Returns the `Kind` of a result computed row by row from its operands.

    The operands have equal shapes.
    """
    if all(kind.is_const for kind in call.kinds):
        return join_constants(call.kinds)
    kind = join_all(call.kinds, call)
    return kind.but(count=0, columns=frozenset())
