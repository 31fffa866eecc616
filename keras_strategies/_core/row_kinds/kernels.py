"""Rules for kernels, which are not traced as equations of JAX's own.

Only what a step computes forward has one: the gradients of kernels are not
differentiated again, so no loss is made of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies._core.row_kinds.call import Call, joined_plain
from keras_strategies._core.row_kinds.kinds import Kind, rows

CUDNN = {
    # query, key, value, bias, lengths, offsets, page tables; output, statistics
    "dot_product_attention_fwd_wrapper": ((0,) * 10, (0, 0)),
    # inputs, states, weights, lengths; outputs, states, space for the gradient
    "rnn_fwd": ((0, 1, 1, None, 0), (0, 1, 1, 0)),
}
"""By primitive, the dimension of rows in each operand and in each result."""


def cudnn(call: Call) -> list[Kind]:
    """The kinds of what cuDNN's attention and LSTM compute."""
    operands, results = CUDNN[call.name]
    places = [{} if axis is None else {axis: 0} for axis in operands]
    return _by_rows(call, places, [{axis: 0} for axis in results])


def pallas(call: Call) -> list[Kind]:
    """The kinds of what a kernel of Pallas's computes.

    `vmap` maps a kernel by a dimension of its grid. An entry along that
    dimension is computed of the operands' entries at the same place.
    """
    mapping = call.params["grid_mapping"]
    kernels = {str(equation.params["jaxpr"]) for equation in call.equations}
    if len(kernels) > 1 or mapping.num_dynamic_grid_bounds:
        return [call.mixed()] * len(call.equation.outvars)
    mapped = [_mapped(block, mapping) for block in mapping.block_mappings]
    count = len(mapped) - len(call.equation.outvars)
    scalars: list[dict[int, int]] = [{}] * mapping.num_index_operands
    return _by_rows(call, scalars + mapped[:count], mapped[count:])


def _mapped(block: Any, mapping: Any) -> dict[int, int]:
    """The dimensions that `vmap` has mapped, with that of the grid."""
    from jax.experimental.pallas import Squeezed

    index = block.index_map_jaxpr.jaxpr
    grid = {index.invars[dim]: dim for dim in mapping.vmapped_dims}
    sizes = zip(block.block_shape, index.outvars, strict=True)
    return {
        axis: grid[place]
        for axis, (size, place) in enumerate(sizes)
        if isinstance(size, Squeezed) and not hasattr(place, "val")
        if place in grid
    }


def _by_rows(
    call: Call,
    operands: Sequence[Mapping[int, int]],
    results: Sequence[Mapping[int, int]],
) -> list[Kind]:
    """The kinds of results whose rows are made of the operands' rows.

    Args:
      call: The call of the kernel.
      operands: Of each operand, by dimension, the dimension of the kernel's
        grid along which it is computed entry by entry.
      results: The same of each result.
    """
    if all(kind.is_const for kind in call.kinds):
        return [joined_plain(call.kinds)] * len(results)
    wrong = [call.mixed()] * len(results)
    given = list(enumerate(zip(call.kinds, operands, strict=True)))
    if not all(
        k.is_rows and k.outer == 1 for k in call.kinds if not k.is_const
    ):
        return wrong
    dims = {
        places.get(kind.axis) for _, (kind, places) in given if kind.is_rows
    }
    if len(dims) > 1 or None in dims:
        return wrong
    (dim,) = dims
    for k, (kind, places) in given:
        for axis in (axis for axis, of in places.items() if of == dim):
            size = call.shape(k)[axis]
            if kind.is_const and size > 1 and not kind.is_flat(axis, size):
                return wrong
    axes = [next((a for a, d in r.items() if d == dim), None) for r in results]
    return [call.mixed() if axis is None else rows(axis) for axis in axes]
