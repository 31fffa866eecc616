"""Counts the floating-point operations of a traced program."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    jaxpr_as_fun,
    jaxprs_in_params,
)

from keras_strategies._types import Array, Equation, Tree
from keras_strategies.passes.sharded_calls import is_rematerialized
from keras_strategies.passes.stages import rewrite_programs


def count_training_flops(
    forward: Callable[..., Tree], weights: Sequence[Array], *args: Tree
) -> float:
    """Counts the operations of a function and of its gradients.

    Only the gradients that the weights need are counted: below the first
    layer with weights, and for the weights that are not among `weights`, there
    are none. Operations of rematerialization are not counted.

    Args:
      forward: A function of `weights` and `args`. Gradients of all its results
        with a floating-point dtype are counted.
      weights: The arrays or shapes whose gradients are computed.
      *args: Other arguments, as arrays or shapes.
    """

    def differentiable(weights: Sequence[Array], *args: Tree) -> list[Any]:
        results = jax.tree.leaves(forward(weights, *args))
        return [x for x in results if jax.numpy.issubdtype(x.dtype, np.inexact)]

    traced = jax.make_jaxpr(differentiable)(weights, *args)
    function = jaxpr_as_fun(rewrite_programs(traced, _save_everything))

    def both(weights: Sequence[Array], rest: Sequence[Array]) -> Tree:
        results, pull_back = jax.vjp(lambda w: function(*w, *rest), weights)
        return results, pull_back(results)

    rest = jax.tree.leaves(args)
    return count_flops(jax.make_jaxpr(both)(list(weights), rest))


def _save_everything(jaxpr: Jaxpr) -> list[Any]:
    """Returns a program's equations with nothing to rematerialize."""
    policy = jax.checkpoint_policies.everything_saveable
    return [
        equation.replace(params={**equation.params, "policy": policy})
        if is_rematerialized(equation)
        else equation
        for equation in jaxpr.eqns
    ]


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
            total += _count_product(equation)
        elif name == "conv_general_dilated":
            total += _count_convolution(equation)
        inner = [count_flops(part) for part in jaxprs_in_params(params)]
        if name == "cond":
            total += max(inner, default=0.0)
        else:
            total += params.get("length", 1) * sum(inner)
    return total


def _count_product(equation: Equation) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    sizes = equation.invars[0].aval.shape
    summed = math.prod(sizes[dim] for dim in contracted)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * summed


def _count_convolution(equation: Equation) -> float:
    numbers, params = equation.params["dimension_numbers"], equation.params
    arrays = (*equation.invars, *equation.outvars)
    shapes = [
        [array.aval.shape[dim] for dim in spec]
        for array, spec in zip(arrays, numbers, strict=True)
    ]
    _, (_, features, *_), (rows, filters, *_) = shapes
    total = 2.0 * features * rows * filters
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    for sizes, stride, (before, _), spread, holes in zip(
        zip(*(shape[2:] for shape in shapes), strict=True),
        *map(params.__getitem__, names),
        strict=True,
    ):
        total *= count_positions(sizes, stride, before, spread, holes)
    return total


def count_positions(
    sizes: tuple[int, ...], stride: int, before: int, spread: int, holes: int
) -> int:
    """Counts the input's entries that a convolution reads in a dimension.

    Args:
      sizes: The sizes of the input, the kernel and the output.
      stride: The distance of the windows of two neighboring outputs.
      before: The padding before the input.
      spread: The dilation of the input.
      holes: The dilation of the kernel.

    Returns:
      The number of entries, in total for all outputs, without padding.
    """
    size, kernel, out = sizes
    # `places` contains the positions in the dilated input that each output
    # reads. Positions outside of the input, and positions between its entries,
    # are padding.
    starts = np.arange(out)[:, None] * stride - before
    places = starts + np.arange(kernel) * holes
    is_padding = (places < 0) | (places > (size - 1) * spread)
    return int(np.count_nonzero(~is_padding & (places % spread == 0)))
