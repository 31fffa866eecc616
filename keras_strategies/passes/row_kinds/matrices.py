"""Rules for linear algebra, which computes with the last dimensions.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

from collections.abc import Callable

from keras_strategies.passes.row_kinds.call import (
    Call,
    at_axis,
    join_plain,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    Kind,
    is_constant,
    make_rows,
)


def make_matrix_rule(
    dims: int, *, is_linear: bool = False
) -> Callable[[Call], Kind]:
    """Makes the rule for primitives that operate on the last dimensions.

    Args:
      dims: How many of the last dimensions the primitives operate on.
      is_linear: Whether the primitives are linear in their last operand.
    """

    def rule(call: Call) -> Kind:
        for k, kind in enumerate(call.kinds):
            is_within = kind.axis >= len(call.shape(k)) - dims
            if kind.is_sum or (kind.is_rows and is_within):
                return call.make_mixed()
        row_kinds = [kind for kind in call.kinds if kind.is_rows]
        if not row_kinds:
            return join_plain(call.kinds)
        first = row_kinds[0]
        if not all(
            call.is_aligned(k, first.axis, first.outer)
            for k in range(len(call.kinds))
        ):
            return call.make_mixed()
        is_known = all(kind.power is not None for kind in row_kinds)
        power = 0.0 if is_known else None
        if is_linear:
            *others, last = call.kinds
            if not all(kind.is_plain for kind in others):
                return call.make_mixed()
            is_const = last.is_const
            power = scale_power(power, last, call) if is_const else last.power
        return make_rows(first.axis, first.outer, power)

    return rule


def triangular_solve(call: Call) -> Kind:
    """Returns the `Kind` of the solution of triangular systems of equations.

    The columns of a matrix of right-hand sides are solved separately.
    """
    matrix, sides = call.kinds
    column_dim = len(call.shape(1)) - (1 if call.params["left_side"] else 2)
    if matrix.is_const and sides.is_rows and sides.axis == column_dim:
        return (
            at_axis(sides.but(count=0), column_dim)
            if is_constant(matrix)
            else call.make_mixed()
        )
    return make_matrix_rule(2, is_linear=True)(call)


def fft(call: Call) -> Kind:
    """Returns the `Kind` of the result of a Fourier transform."""
    dims = len(call.params["fft_lengths"])
    return make_matrix_rule(dims, is_linear=True)(call)
