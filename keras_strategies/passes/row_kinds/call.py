"""An equation with the `Kind` of each operand, and helpers for the rules."""

import dataclasses
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
)


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

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """Returns the shape of operand `k`."""
        return self.equation.invars[k].aval.shape

    def out_shape(self, k: int = 0) -> tuple[int, ...]:
        """Returns the shape of result `k`."""
        return self.equation.outvars[k].aval.shape

    def grown_dims(self, k: int = 0) -> list[int]:
        """Returns operand `k`'s dimensions whose size differs when retraced."""
        return _changing([e.invars[k] for e in self.equations])

    def out_grown_dims(self, k: int = 0) -> list[int]:
        """Returns result `k`'s dimensions whose size differs when retraced."""
        return _changing([e.outvars[k] for e in self.equations])

    def make_mixed(self) -> Kind:
        """Returns the `Kind` of a result in which this equation mixes rows."""
        return make_mixed(self.equation)

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

    def inner(self, kind: Kind, k: int = 0) -> int:
        """Returns how many consecutive entries along `kind.axis` a row has."""
        return self.shape(k)[kind.axis] // (kind.outer * self.num_rows)


def _changing(variables: Sequence[Any]) -> list[int]:
    """Returns the dimensions whose size differs between the traces."""
    sizes = zip(*(v.aval.shape for v in variables), strict=True)
    return [
        dim for dim, dim_sizes in enumerate(sizes) if len(set(dim_sizes)) > 1
    ]


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


def power_in(kind: Kind, call: Call) -> float:
    """Returns the exponent of a constant in an equation with two traces."""
    power = kind.power_in(call.ratio)
    return math.nan if power is None else power


def add_powers(kinds: Sequence[Kind]) -> float | None:
    """Adds the exponents of two factors; None if one of them is unknown."""
    powers = [kind.power for kind in kinds]
    return None if None in powers else sum(p or 0.0 for p in powers)


def join_all(kinds: Sequence[Kind], call: Call) -> Kind:
    """Returns the `Kind` of a result that may equal any of the operands."""
    result = kinds[0]
    for kind in kinds[1:]:
        result = join(result, kind, call.out_shape(), call.equation)
    return result


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
    if kind.is_rows:
        axis = to(kind.axis)
        return call.make_mixed() if axis is None else at_axis(kind, axis)
    if kind.is_sum:
        return kind.but(count=0)
    if kind.values is not None:
        return make_uniform(kind.values, call.out_shape(out))
    blocks = {to(axis): size for axis, size in kind.blocks.items()}
    indexed_dim = None if kind.indexed_dim is None else to(kind.indexed_dim)
    return kind.but(
        blocks={axis: s for axis, s in blocks.items() if axis is not None},
        indexed_dim=indexed_dim,
        numbering=None,
    )


def drop_dims(
    call: Call, dims: Sequence[int], kind: Kind | None = None, out: int = 0
) -> Kind:
    """Returns the `Kind` of a result without some of operand 0's dimensions."""
    kept = other_dims(call.shape(), dims)

    def to(axis: int) -> int | None:
        return kept.index(axis) if axis in kept else None

    return move_dims(call, to, kind, out)


def at_axis(kind: Kind, axis: int, outer: int | None = None) -> Kind:
    """Returns a `ROWS` kind with the rows moved to dimension `axis`."""
    outer = kind.outer if outer is None else outer
    return kind.but(axis=axis, outer=outer, columns=frozenset())


def kind_of_entries(call: Call) -> Kind:
    """Returns the `Kind` of a result computed row by row from its operands.

    The operands have equal shapes.
    """
    if all(kind.is_const for kind in call.kinds):
        return join_constants(call.kinds)
    kind = join_all(call.kinds, call)
    return kind.but(count=0, columns=frozenset())
