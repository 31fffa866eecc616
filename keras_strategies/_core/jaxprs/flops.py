"""Counts the floating-point operations of a traced program."""

import math

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from keras_strategies._types import Equation


def count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    """Counts the multiplications and additions of a traced program.

    Only matrix products and convolutions (without their padding) are counted;
    the rest is negligible. For a conditional, only the most expensive branch is
    counted. For a loop of unknown length, one iteration is counted.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _of_product(equation)
        elif name == "conv_general_dilated":
            total += _of_convolution(equation)
        inner = [count_flops(part) for part in jaxprs_in_params(params)]
        if name == "cond":
            total += max(inner, default=0.0)
        else:
            total += params.get("length", 1) * sum(inner)
    return total


def _of_product(equation: Equation) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    sizes = equation.invars[0].aval.shape
    summed = math.prod(sizes[dim] for dim in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * summed


def _of_convolution(equation: Equation) -> float:
    numbers, params = equation.params["dimension_numbers"], equation.params
    lhs, kernel = (invar.aval.shape for invar in equation.invars)
    out = equation.outvars[0].aval.shape
    total = 2.0 * kernel[numbers.rhs_spec[1]]
    total *= out[numbers.out_spec[0]] * out[numbers.out_spec[1]]
    sizes = zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    for of_lhs, of_rhs, of_out, stride, (before, _), spread, holes in sizes:
        # `places` contains the positions in the dilated input that each output
        # reads. Positions outside of the input, and positions between its
        # entries, are padding.
        starts = np.arange(out[of_out])[:, None] * stride - before
        places = starts + np.arange(kernel[of_rhs]) * holes
        is_padding = (places < 0) | (places > (lhs[of_lhs] - 1) * spread)
        total *= np.count_nonzero(~is_padding & (places % spread == 0))
    return total
