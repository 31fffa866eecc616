"""Rules for linear algebra, which computes with the last dimensions.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

from keras_strategies.passes.row_kinds.call import (
    Call,
    join_plain,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    Kind,
    at_axis,
    is_constant,
    make_rows,
)


def compute_matrices(
    call: Call, dims: int = 2, *, is_linear: bool = False
) -> Kind:
    """Returns the `Kind` of what is computed from the last dimensions.

    Args:
      call: The call.
      dims: How many of the last dimensions the primitive operates on.
      is_linear: Whether the primitive is linear in its last operand.
    """
    for k, kind in enumerate(call.kinds):
        is_before = kind.axis < len(call.shape(k)) - dims
        call.require(kind.is_const or (kind.is_rows and is_before))
    row_kinds = [kind for kind in call.kinds if kind.is_rows]
    if not row_kinds:
        return join_plain(call.kinds)
    first = row_kinds[0]
    for k in range(len(call.kinds)):
        call.require(call.is_aligned(k, first.axis, first.outer))
    is_known = all(kind.power is not None for kind in row_kinds)
    power = 0.0 if is_known else None
    if is_linear:
        *others, last = call.kinds
        call.require(all(kind.is_plain for kind in others))
        power = scale_power(power, last, call) if last.is_const else last.power
    return make_rows(first.axis, first.outer, power)


def triangular_solve(call: Call) -> Kind:
    """Returns the `Kind` of the solution of triangular systems of equations.

    The columns of a matrix of right-hand sides are solved separately.
    """
    matrix, sides = call.kinds
    column_dim = len(call.shape(1)) - (1 if call.params["left_side"] else 2)
    if matrix.is_const and sides.is_rows and sides.axis == column_dim:
        call.require(is_constant(matrix))
        return at_axis(sides.but(count=0), column_dim)
    return compute_matrices(call, is_linear=True)


def fft(call: Call) -> Kind:
    """Returns the `Kind` of the result of a Fourier transform."""
    dims = len(call.params["fft_lengths"])
    return compute_matrices(call, dims, is_linear=True)
