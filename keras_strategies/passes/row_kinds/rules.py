"""The rules that return the kinds of a JAX primitive's results.

See `kinds`. The result of a primitive without a rule is `MIXED`, unless all of
its operands are constants.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from keras_strategies._types import Equation
from keras_strategies.passes.collective_cut import CALLS
from keras_strategies.passes.row_kinds import (
    elementwise,
    indexing,
    kernels,
    marks,
    matrices,
    reductions,
    shapes,
)
from keras_strategies.passes.row_kinds.call import (
    Call,
    RowsMixed,
    join_plain,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    MEAN_POWER,
    PLAIN,
    Kind,
    find_mixed,
    is_constant,
    make_rows,
    make_uniform,
)
from keras_strategies.passes.row_kinds.scales import depends_on_count
from keras_strategies.passes.stages import (
    COLLECTIVES,
    is_collective,
    names_in,
    reduced_dims,
)


def kinds_of_results(call: Call) -> list[Kind]:
    """Returns the `Kind` of each of an equation's results."""
    try:
        results = _apply_rule(call)
    except RowsMixed:
        results = call.make_mixed()
    num = len(call.equation.outvars)
    return results if isinstance(results, list) else [results] * num


def _apply_rule(call: Call) -> Kind | list[Kind]:
    """Returns the `Kind` of each result, or that of all results."""
    num = len(call.equation.outvars)
    if call.name in RANDOM:
        return [_random(call, k) for k in range(num)]
    if call.name in ("reduce_scatter", "psum_scatter") and call.retraced:
        return _scatter_rows(call)
    if call.name in _REDUCTIONS and reduced_dims(call.equation):
        return [_reduce_dims(call, k) for k in range(num)]
    if call.name.startswith(_GLOBAL):
        return _communicate(call)
    if any(kind.is_rows and kind.numbering for kind in call.kinds):
        return _compute_with_numbers(call)
    if call.name == "optimization_barrier":
        return list(call.kinds)
    if call.name == "mul" and any(kind.is_zero for kind in call.kinds):
        # Also of a value that mixes rows.
        return elementwise.elementwise(call)
    wrong = find_mixed(call.kinds)
    if wrong is not None:
        is_product = call.name in ("mul", "div")
        is_by_count = is_product and any(map(depends_on_count, call.kinds))
        return wrong.but(power=math.inf) if is_by_count else wrong
    call.require(_is_scale_safe(call))
    results = _RULES.get(call.name, _compute_constant)(call)
    results = results if isinstance(results, list) else [results] * num
    return [
        _check_with_retrace(call, kind, k) for k, kind in enumerate(results)
    ]


def _compute_constant(call: Call) -> Kind:
    """Returns the `Kind` of the results of a primitive without a rule."""
    call.require(all(kind.is_const for kind in call.kinds))
    return join_plain(call.kinds)


def _communicate(call: Call) -> Kind:
    """Returns the `Kind` of a collective's results."""
    wrong, num = find_mixed(call.kinds), len(call.equation.outvars)
    if wrong is not None or (num == 1 and call.kinds[0].is_zero):
        return wrong or call.kinds[0]
    if call.name.startswith("all_gather") and call.retraced:
        for kind in call.kinds:
            is_scaled = kind.is_rows and kind.power != 0.0
            call.require(not (is_scaled or depends_on_count(kind)))
    is_gathered = any(map(call.out_grown_dims, range(num)))
    return PLAIN.but(is_global=True, is_gathered=is_gathered)


def _compute_with_numbers(call: Call) -> Kind:
    """Returns the `Kind` of a result computed from a scattered `Numbering`."""
    if call.name in ("eq", "ne"):
        return indexing.compare_numbers(call)
    call.require(call.name == "gather")
    return _check_with_retrace(call, indexing.gather(call), 0)


def has_rule(equation: Equation) -> bool:
    """Returns whether an equation is computed by entries, dimensions or calls.

    `jax.vmap` of such an equation computes the same as a loop does.
    """
    name, mark = equation.primitive.name, equation.params.get("name")
    is_kernel = name in ("pallas_call", *kernels.CUDNN)
    is_mark = str(mark).startswith((marks.PREFIX, kernels.BY_ROWS))
    is_known = name in _RULES or name in (*RANDOM, *_CALLS)
    is_shown = is_known and not (is_kernel or is_mark)
    return is_shown or mark == marks.DERIVATIVE


def _reduce_dims(call: Call, k: int) -> Kind:
    """Returns the `Kind` of a sum or a maximum over an axis of `jax.vmap`."""

    def reduce(equation: Any) -> Any:
        return equation.replace(
            primitive=_REDUCTIONS[call.name],
            params={"axes": reduced_dims(equation)},
            invars=equation.invars[k : k + 1],
            outvars=equation.outvars[k : k + 1],
        )

    if is_collective(call.equation):
        return find_mixed(call.kinds) or call.make_mixed()
    reduced = dataclasses.replace(
        call,
        equation=reduce(call.equation),
        retraced=call.retraced and reduce(call.retraced),
        kinds=call.kinds[k : k + 1],
    )
    return kinds_of_results(reduced)[0]


def _scatter_rows(call: Call) -> Kind:
    """Returns the `Kind` of the gradients of rows that were gathered."""
    kind, dim = call.kinds[0], call.params["scatter_dimension"]
    if kind.is_zero:
        return make_uniform(kind.values, call.out_shape())
    call.require(call.out_grown_dims() == [dim] and kind.is_global)
    # A replica sums the derivatives of the replicas' losses, which are equal.
    return make_rows(dim, power=MEAN_POWER)


def _random(call: Call, out: int) -> Kind:
    """Returns the `Kind` of a result of a random primitive.

    The entries of such a result are drawn independently, and the distribution's
    parameters are constants. Only `random_gamma` may have parameters that
    depend on the rows.
    """
    if all(kind.is_const for kind in call.kinds):
        blocks = dict(enumerate(call.out_shape(out)))
        return Kind(form=CONST, is_random=True, blocks=blocks)
    wrong = find_mixed(call.kinds)
    if wrong is not None or call.name != "random_gamma":
        return wrong or call.make_mixed()
    return elementwise.elementwise(call)


def _is_scale_safe(call: Call) -> bool:
    """Returns whether a rule is valid for the exponents of the operands.

    This is the case if the rule tracks exponents, or if all operands are
    constants. It is also the case if the constants do not depend on the number
    of rows, and either the primitive is linear or its `ROWS` operands do not
    scale with that number.
    """
    are_const = all(kind.is_const for kind in call.kinds)
    if call.name in _TRACKS_POWERS or are_const:
        return True
    # Rows at random indices may differ between replicas, so the scale of the
    # indices does not matter.
    is_drawn, kinds = call.name == "gather", call.kinds
    if is_drawn and not call.params["fill_value"]:
        # The rule tracks the exponent of a constant table.
        kinds = kinds[1:]
    elif call.name in _SCATTERS:
        # The rule tracks that of the updates.
        kinds = kinds[:2]
    are_fixed = all(
        is_constant(kind) or (is_drawn and kind.is_random)
        for kind in kinds
        if kind.is_const
    )
    is_plain = all(kind.is_plain for kind in call.kinds if kind.is_rows)
    return are_fixed and (call.name in _LINEAR or is_plain)


def _check_with_retrace(call: Call, kind: Kind, out: int) -> Kind:
    """Corrects a result's kind by comparing it with the other trace.

    Each dimension that grows with the number of rows must be the dimension of
    the rows. If the result lacks such a dimension of an operand, its entries
    were combined, so the result may depend on the number of rows.
    """
    if kind.is_const and any(operand.is_global for operand in call.kinds):
        is_gathered = any(operand.is_gathered for operand in call.kinds)
        counts = any(map(depends_on_count, call.kinds))
        is_local = kind.is_random or counts or _loses_rows(call, out)
        if is_gathered or not is_local:
            return kind.but(is_global=True, is_gathered=is_gathered, power=0.0)
        kind = kind.but(is_global=False)
    if call.retraced is None or kind.is_mixed:
        return kind
    if kind.is_const:
        is_lost = _loses_rows(call, out)
        if kind.is_random:
            if is_lost:
                # The result combines random values of different rows. (Sums are
                # handled by `reduce_sum`.)
                return call.make_mixed()
            if call.name in _TRACKS_POWERS:
                return kind
            others = [k for k in call.kinds if not k.is_random or k.power]
            power = 0.0 if all(map(is_constant, others)) else math.nan
            return kind.but(power=power)
        if kind.values is not None:
            return kind
        is_lost &= call.name != "reduce_sum"
        is_other = is_lost or not _has_same_scalars(call)
        return kind.but(power=math.nan) if is_other else kind
    row_dims = [kind.axis] if kind.is_rows else []
    if kind.is_rows and _is_index(call, out):
        # Indices do not depend on the scale of the entries.
        kind = kind.but(power=0.0)
    is_separate = call.out_grown_dims(out) == row_dims
    is_same = is_separate and _has_same_scalars(call)
    return kind if is_same else call.make_mixed()


def _is_index(call: Call, out: int) -> bool:
    """Returns whether a result consists of indices of the sorted entries."""
    if call.name == "top_k":
        return out == 1
    return call.name == "sort" and is_constant(call.kinds[out])


def _loses_rows(call: Call, out: int) -> bool:
    """Returns whether a result lacks a dimension of rows of an operand."""
    grown = [len(call.grown_dims(k)) for k in range(len(call.kinds))]
    return max(grown, default=0) > len(call.out_grown_dims(out))


def _has_same_scalars(call: Call) -> bool:
    """Returns whether both traces compute with equal parameters."""
    is_convolution = call.name == "conv_general_dilated"
    # Then the numbers of groups are multiples of the numbers of rows.
    is_grouped = is_convolution and reductions.has_groups_of_rows(call)
    return is_grouped or _scalars(call.equation) == _scalars(call.retraced)


def _scalars(equation: JaxprEqn) -> list[Any]:
    """Returns an equation's parameters that are numbers, names or flags."""
    plain = (bool, int, float, str)
    values = [v for v in equation.params.values() if isinstance(v, plain)]
    # `slice` has tuples.
    return [*values, *filter(None, equation.params.get("start_indices", ()))]


_SHAPES = names_in(
    "reshape transpose squeeze expand_dims split stack unstack concatenate pad",
    "tile iota dynamic_slice dynamic_update_slice",
)
_WINDOWS = names_in(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min"
)
_SCATTERS = names_in("scatter scatter-add scatter_add scatter-sub")
_LINEAR = names_in(
    *_SHAPES,
    *_WINDOWS,
    *_SCATTERS,
    "rev sort top_k cumsum cummax cummin reduce_max reduce_min slice gather",
)
"""Primitives that keep the exponent of rows if the constants do not scale."""


RANDOM = names_in(
    "random_bits random_seed random_wrap random_unwrap random_fold_in",
    "random_split random_gamma random_clone threefry2x32 rng_uniform",
    "rng_bit_generator axis_index",
)
"""Primitives whose results are expected to differ between replicas."""

_CALLS = (*CALLS, "custom_linear_solve", "scan", "while", "cond")
"""Primitives that call functions."""

_REDUCTIONS = {
    "psum": lax.reduce_sum_p,
    "pmax": lax.reduce_max_p,
    "pmin": lax.reduce_min_p,
}
"""The reduction that a collective is over an axis of `jax.vmap`."""

_GLOBAL = (*COLLECTIVES, "all_to_all", "pbroadcast")
"""How the names of collectives begin. Their results are those of one device."""

_ELEMENTWISE = names_in(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil",
    "bessel_i0e bessel_i1e clamp clz complex conj convert_element_type copy",
    "copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge",
    "gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log",
    "log1p log2 logistic lt max min mul mulhi ne neg nextafter not",
    "one_minus_square or polygamma polynomial",
    "population_count pow real reduce_precision rem round rsqrt",
    "regularized_incomplete_beta shift_left shift_right_arithmetic",
    "shift_right_logical lt_to le_to eq_to sign sin sinh sqrt square sub tan",
    "tanh xor zeta bitcast_convert_type",
)
_SAME = names_in(
    "sharding_constraint stop_gradient device_put mesh_cast pvary",
    "reduce_and_convert name reshard",
)

_TRACKS_POWERS = names_in(
    *_ELEMENTWISE,
    *_SAME,
    "select_n broadcast_in_dim reshape reduce_sum dot_general",
    "conv_general_dilated select_and_scatter_add triangular_solve fft",
)
"""Primitives whose rules keep track of exponents (`Kind.power`)."""


def _assign(rule: Callable[[Call], Any], *names: str) -> dict[str, Any]:
    """Returns a dict that assigns one rule to several primitives."""
    return dict.fromkeys(names_in(*names), rule)


def _take(module: Any, *names: str) -> dict[str, Any]:
    """Returns a module's rules that have the names of their primitives."""
    return {name: getattr(module, name) for name in names_in(*names)}


_RULES: dict[str, Callable[[Call], Any]] = {
    **_assign(elementwise.elementwise, *_ELEMENTWISE),
    **_assign(lambda call: call.kinds[0], *_SAME),
    "select_n": elementwise.select,
    **_take(shapes, *_SHAPES),
    "broadcast_in_dim": shapes.broadcast,
    "slice": shapes.slice_,
    **_take(reductions, "reduce_sum dot_general"),
    **_assign(
        reductions.reduce,
        "reduce_max reduce_min reduce_prod reduce_and reduce_or",
        "reduce_xor argmax argmin",
    ),
    **_assign(
        reductions.compute_along,
        "cumsum cumprod cummax cummin cumlogsumexp sort top_k",
    ),
    "rev": reductions.reverse,
    **_assign(reductions.reduce_window, *_WINDOWS),
    "select_and_scatter_add": reductions.scatter_to_selected,
    "conv_general_dilated": reductions.convolution,
    **_assign(
        matrices.compute_matrices,
        "cholesky lu qr householder_product eigh svd eig schur",
    ),
    **_take(matrices, "triangular_solve fft"),
    **_assign(kernels.cudnn, *kernels.CUDNN),
    "pallas_call": kernels.pallas,
    "jit": kernels.by_rows,
    "gather": indexing.gather,
    **_assign(
        indexing.scatter,
        "scatter scatter-add scatter_add scatter-mul scatter_mul",
        "scatter-min scatter_min scatter-max scatter_max scatter-sub",
    ),
}
