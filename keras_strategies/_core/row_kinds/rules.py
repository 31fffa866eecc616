"""The rule for each of JAX's primitives; see `kinds`.

What has no rule is `MIXED` unless all of its operands are constants.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from keras_strategies._core.jaxprs.stages import names_in
from keras_strategies._core.row_kinds import (
    elementwise,
    indexing,
    kernels,
    reductions,
    shapes,
)
from keras_strategies._core.row_kinds.call import Call, joined_plain
from keras_strategies._core.row_kinds.kinds import (
    CONST,
    PLAIN,
    Kind,
    first_mixed,
    is_constant,
)


def kinds_of_results(call: Call) -> list[Kind]:
    """Returns the kinds of an equation's results."""
    num = len(call.equation.outvars)
    if call.name in _RANDOM:
        return [_random(call, k) for k in range(num)]
    if call.name in _GLOBAL:
        wrong = first_mixed(call.kinds)
        exact = PLAIN.but(is_global=True)
        return [wrong or exact] * num
    if call.name == "optimization_barrier":
        return list(call.kinds)
    rule = _RULES.get(call.name)
    if rule is None and all(kind.is_const for kind in call.kinds):
        found = joined_plain(call.kinds)
        return [_beside_twin(call, found, k) for k in range(num)]
    wrong = first_mixed(call.kinds)
    if wrong is not None:
        return [wrong] * num
    if rule is None or not _is_scaled_alike(call):
        return [call.mixed()] * num
    found = rule(call)
    found = found if isinstance(found, list) else [found] * num
    return [_beside_twin(call, kind, k) for k, kind in enumerate(found)]


def _random(call: Call, out: int) -> Kind:
    """Entries drawn for themselves, of fixed parameters or one for each."""
    if all(kind.is_const for kind in call.kinds):
        blocks = dict(enumerate(call.out_shape(out)))
        return Kind(form=CONST, is_random=True, blocks=blocks)
    wrong = first_mixed(call.kinds)
    if wrong is not None or call.name != "random_gamma":
        return wrong or call.mixed()
    return elementwise.elementwise(call)


def _is_scaled_alike(call: Call) -> bool:
    """Whether a rule that knows no powers need not know them."""
    if call.name in _TRACKS_POWERS:
        return True
    # Rows that are drawn are a replica's own, whatever their places.
    is_drawn = call.name == "gather"
    are_fixed = all(
        is_constant(kind) or (is_drawn and kind.is_random)
        for kind in call.kinds
        if kind.is_const
    )
    is_plain = all(k.power in (0.0, None) for k in call.kinds if k.is_rows)
    if all(kind.is_const for kind in call.kinds):
        return True
    return are_fixed and (call.name in _LINEAR or is_plain)


def _beside_twin(call: Call, kind: Kind, out: int) -> Kind:
    """A result's kind, with what the other trace shows of its shape.

    A dimension that grows with the number of rows is the rows', or its
    entries meet in a result that depends on their number.
    """
    is_global = any(operand.is_global for operand in call.kinds)
    if kind.is_const and is_global:
        return kind.but(is_global=True, power=0.0)
    if call.twin is None or kind.is_mixed:
        return kind
    if kind.is_const:
        grown = [len(call.grown(k)) for k in range(len(call.kinds))]
        is_lost = max(grown, default=0) > len(call.out_grown(out))
        if kind.is_random:
            if is_lost:
                # What is drawn for rows, other than added up: `reduce_sum`.
                return call.mixed()
            others = [k for k in call.kinds if not k.is_random or k.power]
            power = 0.0 if all(map(is_constant, others)) else math.nan
            return kind.but(power=power)
        if kind.values is not None:
            return kind
        is_other = is_lost or _scalars(call.equation) != _scalars(call.twin)
        return kind.but(power=math.nan) if is_other else kind
    wanted = [kind.axis] if kind.is_rows else []
    dtype = call.equation.outvars[out].aval.dtype
    if kind.is_rows and jnp.issubdtype(dtype, jnp.integer):
        # Places, of which the entries' scale makes no others.
        kind = kind.but(power=0.0)
    if call.out_grown(out) != wanted:
        return call.mixed()
    is_same = _scalars(call.equation) == _scalars(call.twin)
    return kind if is_same else call.mixed()


def _scalars(equation: JaxprEqn) -> list[Any]:
    """An equation's parameters that are plain numbers, names or flags."""
    plain = (bool, int, float, str)
    values = [v for v in equation.params.values() if isinstance(v, plain)]
    if equation.primitive.name == "slice":
        starts = equation.params["start_indices"]
        return [*values, *(start for start in starts if start)]
    return values


_LINEAR = names_in(
    "transpose squeeze expand_dims stack unstack concatenate pad tile rev sort",
    "top_k cumsum cummax cummin reduce_max reduce_min reduce_window",
    "reduce_window_sum reduce_window_max reduce_window_min split slice",
    "dynamic_slice dynamic_update_slice gather scatter scatter-add",
    "scatter_add scatter-sub",
)
"""What keeps the power of rows, if its constants are fixed."""


_RANDOM = names_in(
    "random_bits random_seed random_wrap random_unwrap random_fold_in",
    "random_split random_gamma random_clone threefry2x32 rng_uniform",
    "rng_bit_generator axis_index",
)
"""Each replica's own by definition."""

_GLOBAL = names_in(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant",
    "reduce_scatter psum_scatter all_to_all ppermute pbroadcast",
)
"""The same on all replicas, and what one device would compute."""

_ELEMENTWISE = names_in(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil",
    "bessel_i0e bessel_i1e clamp clz complex conj convert_element_type copy",
    "copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge",
    "gt igamma igammac imag integer_pow is_finite le lgamma log log1p",
    "logistic lt max min mul ne neg nextafter not or polygamma",
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
    "conv_general_dilated",
)
"""Whose rules know what they make of powers."""


def _all(rule: Callable[[Call], Any], *names: str) -> dict[str, Any]:
    return dict.fromkeys(names_in(*names), rule)


_RULES: dict[str, Callable[[Call], Any]] = {
    **_all(elementwise.elementwise, *_ELEMENTWISE),
    **_all(lambda call: call.kinds[0], *_SAME),
    "select_n": elementwise.select,
    "broadcast_in_dim": shapes.broadcast,
    "reshape": shapes.reshape,
    "transpose": shapes.transpose,
    "squeeze": shapes.squeeze,
    "expand_dims": shapes.expand_dims,
    "slice": shapes.slice_,
    "split": shapes.split,
    "stack": shapes.stack,
    "unstack": shapes.unstack,
    "concatenate": shapes.concatenate,
    "pad": shapes.pad,
    "tile": shapes.tile,
    "iota": shapes.iota,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "reduce_sum": reductions.reduce_sum,
    **_all(
        reductions.reduce,
        "reduce_max reduce_min reduce_prod reduce_and reduce_or",
        "reduce_xor argmax argmin",
    ),
    **_all(
        reductions.along(lambda call: call.params["axis"]),
        "cumsum cumprod cummax cummin cumlogsumexp",
    ),
    "rev": reductions.reverse,
    "sort": reductions.along(lambda call: call.params["dimension"]),
    "top_k": reductions.along(
        lambda call: (
            call.params.get("axis", len(call.shape()) - 1) % len(call.shape())
        )
    ),
    **_all(
        reductions.reduce_window,
        "reduce_window reduce_window_sum reduce_window_max",
        "reduce_window_min",
    ),
    "dot_general": reductions.dot_general,
    "conv_general_dilated": reductions.convolution,
    **_all(
        reductions.of_matrices(2),
        "cholesky lu qr householder_product eigh svd eig schur",
    ),
    "triangular_solve": reductions.of_matrices(2),
    "fft": reductions.fft,
    **_all(kernels.cudnn, *kernels.CUDNN),
    "pallas_call": kernels.pallas,
    "gather": indexing.gather,
    **_all(
        indexing.scatter,
        "scatter scatter-add scatter_add scatter-mul scatter_mul",
        "scatter-min scatter_min scatter-max scatter_max scatter-sub",
    ),
}
