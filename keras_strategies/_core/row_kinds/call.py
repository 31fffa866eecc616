"""An equation with the kinds of its operands, and what all rules share."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies._core.row_kinds.kinds import (
    PLAIN,
    Kind,
    is_constant,
    joined,
    joined_constants,
    may_count,
    mixed,
    power_of,
    uniform,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An equation with the kinds of its operands.

    Attributes:
      equation: The equation.
      twin: The same of a trace with more rows; None with one trace.
      kinds: The kinds of its operands.
      num_rows: The number of rows.
      ratio: How many times these rows the other trace has.
    """

    equation: Any
    twin: Any
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
        """The equation in each trace."""
        return [e for e in (self.equation, self.twin) if e is not None]

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """The shape of operand `k`."""
        return self.equation.invars[k].aval.shape

    def out_shape(self, k: int = 0) -> tuple[int, ...]:
        """The shape of result `k`."""
        return self.equation.outvars[k].aval.shape

    def grown(self, k: int = 0) -> list[int]:
        """Returns the dimensions of operand `k` that differ in the twin."""
        return _changing([e.invars[k] for e in self.equations])

    def out_grown(self, k: int = 0) -> list[int]:
        """Returns the dimensions of result `k` that differ in the twin."""
        return _changing([e.outvars[k] for e in self.equations])

    def mixed(self) -> Kind:
        """The kind of a result that mixes rows here."""
        return mixed(self.equation)

    def inner(self, kind: Kind, k: int = 0) -> int:
        """How many entries of the rows' dimension a row has in a block."""
        return self.shape(k)[kind.axis] // (kind.outer * self.num_rows)


def _changing(variables: Sequence[Any]) -> list[int]:
    """Returns the dimensions in which variables of the traces differ."""
    sizes = zip(*(v.aval.shape for v in variables), strict=True)
    return [dim for dim, of_dim in enumerate(sizes) if len(set(of_dim)) > 1]


def other_dims(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Returns the dimensions of an array without some of them."""
    return [dim for dim in range(len(shape)) if dim not in dims]


def joined_plain(kinds: Sequence[Kind]) -> Kind:
    """The kind of a constant that is made of constants in any way."""
    is_random = any(kind.is_random for kind in kinds)
    power = 0.0 if all(map(is_constant, kinds)) else math.nan
    return PLAIN.but(is_random=is_random, power=power)


def scaled_power(
    power: float | None, by: Kind, call: Call, *, inverse: bool = False
) -> float | None:
    """The power of a value times a constant (or divided by it)."""
    if power is None:
        return power
    of_values = by.values is not None
    change = power_of(by.values, call.ratio) if of_values else by.power
    if change is None:
        value = by.values[0] if by.values else 1.0
        return None if may_count(value, call.num_rows) else power
    return power - change if inverse else power + change


def sum_of_powers(kinds: Sequence[Kind]) -> float | None:
    """The power of a product; None if one of them is not known."""
    powers = [kind.power for kind in kinds]
    return None if None in powers else sum(p or 0.0 for p in powers)


def joined_all(kinds: Sequence[Kind], call: Call) -> Kind:
    result = kinds[0]
    for kind in kinds[1:]:
        result = joined(result, kind, call.out_shape(), call.equation)
    return result


def moved(
    call: Call,
    to: Callable[[int], int | None],
    kind: Kind | None = None,
    out: int = 0,
) -> Kind:
    """A kind whose dimensions go to others (None: they are gone)."""
    kind = call.kinds[0] if kind is None else kind
    if kind.is_rows:
        axis = to(kind.axis)
        return call.mixed() if axis is None else at_axis(kind, axis)
    if kind.is_sum:
        return kind.but(count=0)
    if kind.values is not None:
        return uniform(kind.values, call.out_shape(out))
    moved = {to(axis): size for axis, size in kind.blocks.items()}
    index_of = None if kind.index_of is None else to(kind.index_of)
    return kind.but(
        blocks={axis: s for axis, s in moved.items() if axis is not None},
        index_of=index_of,
    )


def without_dims(
    call: Call, dims: Sequence[int], kind: Kind | None = None, out: int = 0
) -> Kind:
    """Returns a kind without some of operand 0's dimensions."""
    kept = other_dims(call.shape(), dims)

    def to(axis: int) -> int | None:
        return kept.index(axis) if axis in kept else None

    return moved(call, to, kind, out)


def at_axis(kind: Kind, axis: int, outer: int | None = None) -> Kind:
    outer = kind.outer if outer is None else outer
    return kind.but(axis=axis, outer=outer, columns=frozenset())


def kind_of_entries(call: Call) -> Kind:
    """Operands of one shape, of which each row makes its own results."""
    if all(kind.is_const for kind in call.kinds):
        return joined_constants(call.kinds)
    found = joined_all(call.kinds, call)
    return found.but(count=0, columns=frozenset())
