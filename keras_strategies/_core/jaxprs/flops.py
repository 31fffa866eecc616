"""Operations of a traced program: those of its products and convolutions."""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def flops_of(jaxpr: Any) -> float:
    """Multiplications and additions of a traced program.

    Of matrix products and convolutions; others are few beside them. Of a
    branch the most, of a loop whose length is not known one turn.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _of_product(equation)
        elif name == "conv_general_dilated":
            total += _of_convolution(equation)
        inner = [flops_of(part) for part in jaxprs_in_params(params)]
        if name == "cond":
            total += max(inner, default=0.0)
        else:
            total += params.get("length", 1) * sum(inner)
    return total


def _of_product(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    sizes = equation.invars[0].aval.shape
    summed = math.prod(sizes[dim] for dim in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * summed


def _of_convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    out_dim = equation.params["dimension_numbers"].rhs_spec[0]
    summed = math.prod(kernel) // max(kernel[out_dim], 1)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * summed
