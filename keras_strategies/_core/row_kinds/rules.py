"""The rule for each of JAX's primitives; see `kinds`.

What has no rule is `MIXED` unless all of its operands are constants.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from keras_strategies._core.row_kinds.call import (
    Call,
    joined_plain,
    names_in,
)
from keras_strategies._core.row_kinds.elementwise import (
    elementwise,
    select,
)
from keras_strategies._core.row_kinds.indexing import (
    gather,
    scatter,
)
from keras_strategies._core.row_kinds.kinds import (
    CONST,
    PLAIN,
    Kind,
    first_mixed,
)
from keras_strategies._core.row_kinds.products import (
    convolution,
    dot_general,
    of_matrices,
)
from keras_strategies._core.row_kinds.reductions import (
    along,
    reduce,
    reduce_sum,
    reduce_window,
    reverse,
)
from keras_strategies._core.row_kinds.shapes import (
    broadcast,
    concatenate,
    dynamic_slice,
    dynamic_update_slice,
    expand_dims,
    iota,
    pad,
    reshape,
    slice_,
    split,
    squeeze,
    stack,
    transpose,
)


def kinds_of_results(call: Call) -> list[Kind]:
    """Returns the kinds of an equation's results."""
    num = len(call.equation.outvars)
    if call.name in _RANDOM:
        return [dataclasses.replace(PLAIN, is_random=True)] * num
    if call.name in _GLOBAL:
        wrong = first_mixed(call.kinds)
        return [wrong or PLAIN] * num
    if call.name == "optimization_barrier":
        return list(call.kinds)
    rule = _RULES.get(call.name)
    if rule is None and all(kind.form == CONST for kind in call.kinds):
        return [joined_plain(call.kinds)] * num
    wrong = first_mixed(call.kinds)
    if wrong is not None:
        return [wrong] * num
    if rule is None:
        return [call.mixed()] * num
    found = rule(call)
    return found if isinstance(found, list) else [found] * num


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

_RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(_SAME, lambda call: call.kinds[0]),
    "select_n": select,
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "slice": slice_,
    "split": split,
    "stack": stack,
    "concatenate": concatenate,
    "pad": pad,
    "iota": iota,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "reduce_sum": reduce_sum,
    **dict.fromkeys(
        names_in(
            "reduce_max reduce_min reduce_prod reduce_and reduce_or",
            "reduce_xor argmax argmin",
        ),
        reduce,
    ),
    **dict.fromkeys(
        names_in("cumsum cumprod cummax cummin cumlogsumexp"),
        along(lambda call: call.params["axis"]),
    ),
    "rev": lambda call: reverse(call),
    "sort": along(lambda call: call.params["dimension"]),
    "top_k": along(
        lambda call: (
            call.params.get("axis", len(call.shape()) - 1) % len(call.shape())
        )
    ),
    **dict.fromkeys(
        names_in(
            "reduce_window reduce_window_sum reduce_window_max",
            "reduce_window_min",
        ),
        reduce_window,
    ),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    **dict.fromkeys(
        names_in("cholesky lu qr householder_product eigh svd eig schur"),
        of_matrices(2),
    ),
    "triangular_solve": of_matrices(2),
    "fft": lambda call: of_matrices(len(call.params["fft_lengths"]))(call),
    "gather": gather,
    **dict.fromkeys(
        names_in(
            "scatter scatter-add scatter_add scatter-mul scatter_mul",
            "scatter-min scatter_min scatter-max scatter_max scatter-sub",
        ),
        scatter,
    ),
}
