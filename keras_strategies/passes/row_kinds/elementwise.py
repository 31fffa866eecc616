"""Rules for elementwise primitives.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Array
from keras_strategies.passes.row_kinds.call import (
    Call,
    add_powers,
    join_all,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    ROWS,
    SUM,
    Kind,
    is_constant,
    join_constants,
    make_sum,
    make_uniform,
    same_power,
)
from keras_strategies.passes.stages import names_in


def elementwise(call: Call) -> Kind:
    """Returns the `Kind` of the result of an elementwise primitive."""
    forms = {kind.form for kind in call.kinds}
    are_known = all(kind.values is not None for kind in call.kinds)
    simplified = None if are_known else _with_zero(call)
    if simplified is not None:
        return simplified
    if forms == {CONST}:
        return _constant(call)
    if SUM in forms:
        call.require(ROWS not in forms)
        return _combine_sums(call)
    return _combine_rows(call)


def _with_zero(call: Call) -> Kind | None:
    """Returns the `Kind` of a sum or a product with zero, or None."""
    if len(call.kinds) != 2 or not any(kind.is_zero for kind in call.kinds):
        return None
    of = 0 if call.kinds[1].is_zero else 1
    is_sum = call.name in ("add", "add_any", "sub")
    if is_sum and call.shape(of) == call.out_shape():
        return call.kinds[of]
    if call.name == "mul" or (call.name == "div" and of == 1):
        zeros = (0,) * len(call.equations)
        return make_uniform(zeros, call.out_shape())
    return None


def _constant(call: Call) -> Kind:
    kinds, shape = call.kinds, call.out_shape()
    if all(kind.values is not None for kind in kinds):
        kind = make_uniform(_compute_values(call), shape)
        is_known = kind.values is not None or all(map(is_constant, kinds))
        return kind if is_known else kind.but(power=math.nan)
    first = kinds[0]
    is_index = first.indexed_dim is not None and kinds[-1].is_zero
    if call.name in ("lt", "ge") and is_index:
        # JAX's indexing code compares an index with zero in order to wrap
        # negative indices. This index is never negative, so the result is
        # constant.
        return make_uniform((call.name == "ge",) * len(call.equations), shape)
    if call.name == "convert_element_type":
        is_exact = is_constant(first) or jnp.issubdtype(
            call.params["new_dtype"], jnp.floating
        )
        kind = first.but(numbering=None)
        return kind if is_exact else kind.but(power=math.nan, entries=None)
    spread = [
        _spread(kind, call.shape(k), shape) for k, kind in enumerate(kinds)
    ]
    return join_constants(spread).but(
        power=_power_of_constants(call), numbering=_add_to_numbering(call)
    )


def _add_to_numbering(call: Call) -> int | None:
    """Returns the `Kind.numbering` of an array plus a constant, or None."""
    array, number = call.kinds[0], call.kinds[-1]
    values = set(number.values or ())
    is_sum = call.name == "add" and call.shape() == call.out_shape()
    is_numbered = is_sum and array.numbering is not None and len(values) == 1
    return array.numbering + values.pop() if is_numbered else None


def _spread(kind: Kind, before: Sequence[int], after: Sequence[int]) -> Kind:
    """Returns the `Kind` of a constant operand after broadcasting it."""
    if kind.values is not None or len(before) < len(after):
        return make_uniform(kind.values, after)
    spread = {
        axis: size
        for axis, size in enumerate(after)
        if before[axis] == 1 or kind.blocks.get(axis) == size
    }
    return kind.but(blocks={**kind.blocks, **spread})


def _power_of_constants(call: Call) -> float:
    """Returns p if a constant scales as num_rows**p, or NaN if it does not.

    With only one trace the exponent is unknown and assumed to be 0.
    """
    if call.retraced is None:
        return 0.0
    kinds = call.kinds
    is_sum = call.name in ("add", "sub", "add_any", "select_n")
    if call.name == "select_n":
        if not is_constant(kinds[0]):
            return math.nan
        kinds = kinds[1:]
    powers = [
        kind.power_in(call.ratio) or 0.0
        for kind in kinds
        if not (is_sum and kind.is_zero)
    ]
    if not any(powers):
        return 0.0
    if call.name in ("mul", "div"):
        one, two = powers
        return one + two if call.name == "mul" else one - two
    are_equal = len(set(powers)) == 1
    is_kept = is_sum or call.name in ("neg", "copy", "reduce_precision")
    return powers[0] if are_equal and is_kept else math.nan


def _compute_values(call: Call) -> tuple[Any, ...] | None:
    """Computes a result from operands whose entries are all equal.

    Returns:
      The result's common entry in each trace, or None if it is unknown.
    """
    compute = _NUMPY.get(call.name)
    if compute is None:
        return None
    results = []
    for k, equation in enumerate(call.equations):
        operands: list[Any] = [
            np.asarray((kind.values or ())[k], variable.aval.dtype)
            for kind, variable in zip(call.kinds, equation.invars, strict=True)
        ]
        if call.name == "integer_pow":
            operands.append(float(equation.params["y"]))
        with np.errstate(all="ignore"):
            entry = compute(*operands)
        dtype = equation.outvars[0].aval.dtype
        results.append(np.asarray(entry).astype(dtype).item())
    return tuple(results)


def _divide(one: Array, two: Array) -> Array:
    if np.issubdtype(one.dtype, np.integer):
        return np.trunc(np.divide(one, two))
    return np.divide(one, two)


_OPERATORS = names_in("abs add eq ge gt le lt mul ne neg sub")
_SAME_NAMES = names_in("ceil exp floor log sign sqrt square")
_NUMPY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    **{name: getattr(np, name) for name in _SAME_NAMES},
    "add_any": np.add,
    "and": np.bitwise_and,
    "convert_element_type": np.asarray,
    "copy": np.asarray,
    "div": _divide,
    "integer_pow": operator.pow,
    "max": np.maximum,
    "min": np.minimum,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: cases[int(which)],
}
"""NumPy implementations of primitives, to compute constants."""


def _combine_sums(call: Call) -> Kind:
    name, kinds = call.name, call.kinds
    if name in ("add", "sub", "add_any"):
        return join_all(kinds, call)
    if name == "select_n" and kinds[0].is_const:
        call.require(is_constant(kinds[0]))
        return join_all(kinds[1:], call)
    of = next(k for k, kind in enumerate(kinds) if kind.is_sum)
    kind, others = kinds[of], [k for i, k in enumerate(kinds) if i != of]
    if name == "convert_element_type":
        is_float = jnp.issubdtype(call.params["new_dtype"], jnp.floating)
        call.require(is_float or _has_integers(call))
        return kind
    if name in ("neg", "copy", "copy_p", "reduce_precision", "real", "imag"):
        return kind
    # A quotient of integers is truncated.
    is_quotient = name == "div" and of == 0 and not _has_integers(call)
    call.require((name == "mul" or is_quotient) and others[0].is_const)
    return make_sum(
        scale_power(kind.power, others[0], call, inverse=is_quotient)
    )


def _has_integers(call: Call) -> bool:
    """Returns whether operand 0 consists of integers or booleans."""
    dtype = call.equation.invars[0].aval.dtype
    return not jnp.issubdtype(dtype, jnp.inexact)


def _combine_rows(call: Call) -> Kind:
    kinds = call.kinds
    row_kinds = [kind for kind in kinds if kind.is_rows]
    first = row_kinds[0]
    call.require(len({(kind.axis, kind.outer) for kind in row_kinds}) == 1)
    size = call.shape(kinds.index(first))[first.axis] // first.outer
    # Constants must be equal for all rows. Otherwise the result of a row would
    # depend on the row's position in the batch, and its position in a replica's
    # batch is different.
    for k, kind in enumerate(kinds):
        shape = call.shape(k)
        is_spread = kind.is_rows or not shape or shape[first.axis] == 1
        call.require(is_spread or kind.is_flat(first.axis, size))
    keeps = call.name == "convert_element_type"
    return first.but(
        power=_power_of_rows(call, row_kinds),
        columns=first.columns if keeps else frozenset(),
        count=first.count if keeps else 0,
    )


def _power_of_rows(call: Call, row_kinds: list[Kind]) -> float | None:
    """Returns the exponent p such that a result scales as num_rows**p.

    Args:
      call: An elementwise equation.
      row_kinds: The kinds of those operands that are `ROWS`.

    Raises:
      RowsMixed: if there is no such exponent.
    """
    name, kinds = call.name, call.kinds
    first = row_kinds[0]
    constants = [kind for kind in kinds if kind.is_const]
    is_known = all(kind.power is not None for kind in row_kinds)
    if name == "convert_element_type" and not jnp.issubdtype(
        call.params["new_dtype"], jnp.inexact
    ):
        call.require(first.is_plain)
        return first.power
    if name in ("neg", "copy", "copy_p", "convert_element_type"):
        return first.power
    if name == "select_n":
        return _power_of_cases(call)
    is_product = name == "mul" or (name == "div" and not _has_integers(call))
    if is_product:
        if len(row_kinds) == 1:
            (by,) = constants
            is_inverse = name == "div"
            if is_inverse and kinds[0].is_const:
                call.require(first.is_plain)
                return scale_power(0.0 if is_known else None, by, call)
            counts = set(by.values or (None,))
            # If the divisor is the number of entries that the last sum added,
            # the result is a mean within each row, even if the divisor happens
            # to equal the number of rows.
            if is_inverse and counts == {first.count}:
                return first.power
            return scale_power(first.power, by, call, inverse=is_inverse)
        if name == "mul" or not is_known:
            return add_powers(row_kinds)
        one, two = (kind.power or 0.0 for kind in kinds)
        return one - two
    if name in _DEGREES and is_known:
        degree = call.params["y"] if name == "integer_pow" else _DEGREES[name]
        return degree * (first.power or 0.0)
    if name in ("add", "sub", "add_any", "complex"):
        constants = [kind for kind in constants if not kind.is_zero]
        is_same, power = same_power(row_kinds[0].power, row_kinds[-1].power)
        are_fixed = all(map(is_constant, constants))
        if is_known and call.retraced is not None:
            are_fixed = all(k.power_in(call.ratio) == power for k in constants)
        elif constants:
            is_same = power in (0.0, None)
        call.require(is_same and are_fixed)
        return power
    call.require(all(kind.is_plain for kind in kinds))
    return 0.0 if is_known else None


_DEGREES = {
    **dict.fromkeys(names_in("abs conj imag real"), 1.0),
    "integer_pow": math.nan,
    "rsqrt": -0.5,
    "sign": 0.0,
    "sqrt": 0.5,
    "square": 2.0,
}
"""The exponents d of primitives for which f(c * x) = c**d * f(x), if c > 0."""


def _power_of_cases(call: Call) -> float | None:
    """Returns the same as `_power_of_rows`, for the primitive `select_n`."""
    which, *cases = call.kinds
    call.require(which.is_rows or is_constant(which))
    cases = [kind for kind in cases if not kind.is_zero]
    if any(kind.power is None for kind in cases if kind.is_rows):
        call.require(all(kind.is_plain for kind in cases))
        return None
    powers = {
        kind.power
        if kind.is_rows or call.retraced is None
        else kind.power_in(call.ratio)
        for kind in cases
    }
    power = powers.pop() if powers else 0.0
    call.require(not powers and power == power)
    return power


def select(call: Call) -> Kind:
    """Returns the `Kind` of the result of a `select_n`."""
    which, *cases = call.kinds
    # Of equal constants any, such as zeros in the gradient of a masked loop.
    are_equal = cases[0].values is not None and cases[1:] == cases[:-1]
    chosen = {0} if are_equal else set(map(int, which.values or ()))
    return cases[chosen.pop()] if len(chosen) == 1 else elementwise(call)
