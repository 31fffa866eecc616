"""Kinds of traced values: how they depend on the rows of a batch.

A value has one of four forms:

- `CONST` does not depend on the contents of the rows.
- `ROWS` has an entry (or a block of entries) for each row, which depends only
  on that row.
- `SUM` is linear in sums over all rows. Each term of such a sum depends on only
  one row.
- `MIXED` is anything else.

A value may also scale as num_rows**p. Its form and the exponent p together
decide whether the mean of the replicas' values equals the value of the global
batch. This holds for constants, and for sums over rows that are divided by the
number of rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from keras_strategies._types import Array

CONST, ROWS, SUM, MIXED = "const", "rows", "sum", "mixed"

MEAN_POWER = -1.0
"""The exponent (`Kind.power`) of a mean over rows."""

_MAX_ENTRIES = 1 << 20
"""The size above which the values of captured arrays are not inspected."""

_MAX_INTEGERS = 16
"""The size above which the entries of a list of integers are not kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """The way in which a traced value depends on the rows of a batch.

    Attributes:
      form: `CONST`, `ROWS`, `SUM` or `MIXED`.
      axis: The dimension that contains the rows (`ROWS`).
      outer: The number of blocks in dimension `axis` that each contain all
        rows. For example, it is 2 after two batches were concatenated (`ROWS`).
      power: The exponent p such that the value scales as num_rows**p. NaN if
        there is no such exponent. None if it is unknown, because the value
        mixes rows, or contains a constant that may depend on the number of
        rows. Of a value computed from one sum over rows and constants, it is
        the sum's (`MIXED`); infinite after a product with a number of rows.
      count: The number of entries that the last sum within a row added.
        Dividing by this number computes a mean (`ROWS`).
      columns: The positions in the last dimension at which the entry is the
        row's own index (`ROWS`).
      blocks: For each dimension, the size of the blocks within which the value
        is constant along that dimension (`CONST`).
      values: If all entries are equal: the entry in each of the traces
        (`CONST`).
      entries: If it is a list of a few integers, such as a shape, that differ
        between the traces: the integers in each trace (`CONST`).
      indexed_dim: The dimension along which each entry is its own index, as in
        an `iota` (`CONST`).
      numbering: If each entry is its place in the array's row-major order, plus
        a number: that number (`CONST`). If each entry is zero or an entry of
        such an array that belongs to the same row: the array's `Numbering`
        (`ROWS`).
      is_random: Whether the value is random, so that it is expected to differ
        between replicas (`CONST`).
      is_global: Whether the value is computed from the values of all replicas,
        with the same result as on one device, so that it may depend on the
        number of rows (`CONST`).
      is_gathered: Whether such a value is computed from the gathered rows of
        all replicas, so that a number of rows in it is theirs (`CONST`).
      from_loss: Whether the value is computed from a value that is marked as a
        loss.
      why: The equation that mixes rows (`MIXED`).
    """

    form: str
    axis: int = -1
    outer: int = 1
    power: float | None = 0.0
    count: int = 0
    columns: frozenset[int] = frozenset()
    blocks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    values: tuple[Any, ...] | None = None
    entries: tuple[tuple[int, ...], ...] | None = None
    indexed_dim: int | None = None
    numbering: Any = None
    is_random: bool = False
    is_global: bool = False
    is_gathered: bool = False
    from_loss: bool = False
    why: Any = None

    def is_flat(self, axis: int, size: int) -> bool:
        """Returns whether entries in blocks of `size` along `axis` are equal.

        Random entries that are drawn independently count as equal.
        """
        if self.values is not None:
            return True
        return self.blocks.get(axis, 1) % size == 0

    @property
    def is_const(self) -> bool:
        """Whether the value does not depend on the contents of the rows."""
        return self.form == CONST

    @property
    def is_rows(self) -> bool:
        """Whether the value has entries for each row."""
        return self.form == ROWS

    @property
    def is_sum(self) -> bool:
        """Whether the value is linear in sums over the rows."""
        return self.form == SUM

    @property
    def is_mixed(self) -> bool:
        """Whether the value mixes rows."""
        return self.form == MIXED

    def but(self, **changes: Any) -> "Kind":
        """Returns a copy with some attributes changed."""
        copy = object.__new__(Kind)
        vars(copy).update(vars(self), **changes)
        return copy

    def power_in(self, ratio: float) -> Any:
        """Returns the exponent p such that a value scales as num_rows**p.

        If all entries are equal, it is found by comparing the traces.

        Args:
          ratio: The number of rows in the second trace, divided by the number
            in the first trace.

        Returns:
          The exponent. NaN if no such exponent exists, or None if it is
          unknown, such as that of equal entries if there is only one trace.
        """
        if self.values is None:
            return self.power
        if len(self.values) == 1:
            return None
        if _are_equal(self.values):
            return 0.0
        small, large = self.values
        change = large / small if small else math.nan
        if isinstance(change, complex):
            change = math.nan if change.imag else change.real
        if not math.isfinite(change) or change <= 0:
            return math.nan
        # Rounded to the precision of 32-bit numbers.
        return round(math.log(change) / math.log(ratio), 5)

    @property
    def is_plain(self) -> bool:
        """Whether the value does not scale with the number of rows."""
        if self.is_const:
            return is_constant(self)
        return self.power in (0.0, None)

    @property
    def is_zero(self) -> bool:
        """Whether the value is a constant whose entries are all zero."""
        return self.values is not None and not any(self.values)


PLAIN = Kind(form=CONST)


def make_mixed(why: JaxprEqn | None) -> Kind:
    """Returns the `Kind` of a value that mixes rows at the equation `why`."""
    return Kind(form=MIXED, power=None, why=why)


def make_rows(axis: int, outer: int = 1, power: float | None = 0.0) -> Kind:
    """Returns the `Kind` of a value with an entry for each row."""
    return Kind(form=ROWS, axis=axis, outer=outer, power=power)


def make_sum(power: float | None) -> Kind:
    """Returns the `Kind` of a sum over rows."""
    return Kind(form=SUM, power=power)


def make_uniform(values: tuple[Any, ...] | None, shape: Sequence[int]) -> Kind:
    """Returns the `Kind` of a constant whose entries are all equal."""
    blocks = dict(enumerate(shape))
    return Kind(form=CONST, values=values, blocks=blocks)


def find_mixed(kinds: Sequence[Kind]) -> Kind | None:
    """Returns the first kind that mixes rows, or None."""
    return next((kind for kind in kinds if kind.is_mixed), None)


def _are_equal(values: tuple[Any, ...]) -> bool:
    first = values[0]
    return all(v == first or (v != v and first != first) for v in values)


def may_count(value: Array, num_rows: int) -> bool:
    """Returns whether a number may have been computed from `num_rows`.

    Checks for example whether the number or its inverse is a multiple of
    `num_rows`.
    """
    number = float(abs(value))
    if not math.isfinite(number) or number in (0.0, 1.0):
        return False
    number = max(number, 1 / number)
    count = round(number)
    if math.isclose(number, count, rel_tol=1e-4):
        # A multiple of the number of rows, or such a multiple plus or minus one
        # (as in n - 1).
        rests = (0, 1, num_rows - 1)
        return count >= num_rows - 1 and count % num_rows in rests
    # The number may be the square root of the number of rows, for example.
    count = round(number**2)
    is_root = math.isclose(number**2, count, rel_tol=1e-4)
    return is_root and count >= num_rows and count % num_rows == 0


def same_power(
    one: float | None, two: float | None
) -> tuple[bool, float | None]:
    """Returns whether two exponents may be equal, and the common exponent."""
    if one is None or two is None:
        return True, None
    return one == two or math.isclose(one, two), one


def is_constant(kind: Kind) -> bool:
    """Returns whether a constant does not depend on the number of rows."""
    if kind.values is None:
        return kind.power == 0.0
    return _are_equal(kind.values)


def join(one: Kind, two: Kind, shape: Sequence[int], why: JaxprEqn) -> Kind:
    """Returns the `Kind` of a value that may have either of two kinds.

    Args:
      one: A kind.
      two: Another kind.
      shape: The shape of the value.
      why: The equation that computes the value.
    """
    if one == two:
        return one
    wrong = find_mixed((one, two))
    if wrong is not None:
        return wrong
    if one.is_const and two.is_const:
        return join_constants((one, two))
    if any(kind.is_rows and kind.numbering for kind in (one, two)):
        return make_mixed(why)
    if one.is_const:
        one, two = two, one
    if two.is_const:
        # A constant that grows as num_rows is a sum over rows of equal terms.
        growth = one.power
        if growth is not None and one.is_sum:
            growth -= MEAN_POWER
        fits = two.is_zero or is_constant(two)
        if growth:
            fits = two.is_zero or (two.values is None and two.power == growth)
        if one.is_rows:
            fits &= two.is_flat(one.axis, shape[one.axis] // one.outer)
        return one if fits else make_mixed(why)
    is_same, power = same_power(one.power, two.power)
    places = {(kind.form, kind.axis, kind.outer) for kind in (one, two)}
    if not is_same or len(places) > 1:
        return make_mixed(why)
    return one.but(power=power, columns=frozenset(), count=0)


def join_constants(kinds: Sequence[Kind]) -> Kind:
    """Returns the `Kind` of a constant computed elementwise from constants."""
    axes = set.intersection(*(set(kind.blocks) for kind in kinds))
    blocks = {
        axis: math.gcd(*(kind.blocks[axis] for kind in kinds)) for axis in axes
    }
    is_random = any(kind.is_random for kind in kinds)
    powers = {
        kind.power if kind.values is None or is_constant(kind) else math.nan
        for kind in kinds
    }
    power = powers.pop() if len(powers) == 1 else math.nan
    return Kind(form=CONST, blocks=blocks, is_random=is_random, power=power)


def kind_of_arrays(arrays: Sequence[Any]) -> Kind:
    """Returns the `Kind` of a constant, from its value in each trace."""
    shape = np.shape(arrays[0])
    if any(
        isinstance(a, Tracer)
        or not isinstance(getattr(a, "dtype", np.dtype(int)), np.dtype)
        or not 0 < np.size(a) <= _MAX_ENTRIES
        or not getattr(a, "is_fully_addressable", True)
        for a in arrays
    ):
        return PLAIN
    values = [np.asarray(a) for a in arrays]
    firsts = [v.ravel()[0] for v in values]
    pairs = zip(values, firsts, strict=True)
    if all(np.all((v == f) | (f != f)) for v, f in pairs):
        return make_uniform(tuple(f.item() for f in firsts), shape)
    if any(
        v.shape == shape and not np.array_equal(v, values[0])
        for v in values[1:]
    ):
        is_list = values[0].dtype.kind == "i" and len(shape) == 1
        entries = tuple(tuple(v.tolist()) for v in values)
        is_short = is_list and len(entries[0]) <= _MAX_INTEGERS
        return PLAIN.but(power=math.nan, entries=entries if is_short else None)
    if not _are_equal_but_for_rows(values):
        return PLAIN.but(power=math.nan)
    blocks = {}
    for axis, size in enumerate(shape):
        moved = np.moveaxis(values[0], axis, 0)
        if np.array_equal(moved, np.broadcast_to(moved[:1], moved.shape)):
            blocks[axis] = size
    return PLAIN.but(blocks=blocks)


def _are_equal_but_for_rows(values: Sequence[Any]) -> bool:
    """Returns whether arrays begin with equal entries.

    An array may have more entries than the first along dimensions of rows.
    """
    first = values[0]
    part = tuple(slice(size) for size in first.shape)
    is_inexact = bool(np.issubdtype(first.dtype, np.inexact))
    return all(
        value.ndim == first.ndim
        and np.array_equal(value[part], first, equal_nan=is_inexact)
        for value in values[1:]
    )


def at_axis(kind: Kind, axis: int, outer: int | None = None) -> Kind:
    """Returns a `ROWS` kind with the rows moved to dimension `axis`."""
    outer = kind.outer if outer is None else outer
    return kind.but(axis=axis, outer=outer, columns=frozenset())


def move(
    kind: Kind, to: Callable[[int], int | None], why: JaxprEqn | None
) -> Kind:
    """Returns the `Kind` of a value whose dimensions are moved or removed.

    Args:
      kind: The value's kind.
      to: A function that maps a dimension to its new place, or to None if it is
        removed.
      why: The equation that removes dimensions.
    """
    if kind.is_rows:
        axis = to(kind.axis)
        return make_mixed(why) if axis is None else at_axis(kind, axis)
    blocks = {to(axis): size for axis, size in kind.blocks.items()}
    return kind.but(
        blocks={axis: s for axis, s in blocks.items() if axis is not None},
        indexed_dim=None if kind.indexed_dim is None else to(kind.indexed_dim),
        numbering=None,
    )


def slice_kind(kind: Kind, why: JaxprEqn) -> Kind:
    """Returns the `Kind` of one entry along dimension 0 of a value."""
    return move(kind, lambda axis: axis - 1 if axis else None, why)


def stack(kind: Kind) -> Kind:
    """Returns the `Kind` of values stacked along a new dimension 0."""
    return move(kind, lambda axis: axis + 1, None).but(values=None)


def join_each(ones: list[Kind], others: list[Kind], why: Any) -> list[Kind]:
    """Joins two lists that contain one kind for each result of an equation."""
    shapes = [variable.aval.shape for variable in why.outvars[: len(ones)]]
    columns = zip(ones, others, shapes, strict=True)
    return [join(one, two, shape, why) for one, two, shape in columns]
