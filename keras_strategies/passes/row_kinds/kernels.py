"""Rules for kernels (cuDNN, Pallas), whose code JAX does not trace.

Only kernels of the forward pass have rules. Gradients of kernels are not
differentiated again, so no loss depends on them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies._types import Equation
from keras_strategies.passes.row_kinds.call import Call, join_plain
from keras_strategies.passes.row_kinds.kinds import Kind, make_rows

CUDNN = {
    # Operands: query, key, value, bias, lengths, offsets, page tables.
    # Results: output, statistics.
    "dot_product_attention_fwd_wrapper": ((0,) * 10, (0, 0)),
    # Operands: inputs, two states, weights, lengths.
    # Results: outputs, two states, space for the gradient.
    "rnn_fwd": ((0, 1, 1, None, 0), (0, 1, 1, 0)),
}
"""For each primitive: the row dimension of each operand and of each result."""

BY_ROWS = "computed_by_rows"
"""The beginning of the name of a jitted function that computes each row of its
results only from the same row of its operands. The rows are the first
dimension. The name also contains all numbers that are no operands, so that
calls with other numbers have other names."""


def is_by_rows(equation: Equation) -> bool:
    """Returns whether an equation calls a function that `by_rows` marks."""
    return str(equation.params.get("name")).startswith(BY_ROWS)


def by_rows(call: Call) -> list[Kind]:
    """Returns the `Kind` of each result of a function of separate rows.

    JAX may add operands: the function's constants, such as tables, which have
    no rows. If the first dimension of one has the size of the rows by chance,
    only another trace shows that.
    """
    call.require(len({len(e.outvars) for e in call.equations}) == 1)
    operands = list(zip(*(e.invars for e in call.equations), strict=True))
    results = zip(*(e.outvars for e in call.equations), strict=True)
    pairs = zip(operands, call.kinds, strict=True)
    sizes = next((_first_sizes(v) for v, kind in pairs if kind.is_rows), [()])

    def find_rows(variables: Sequence[Any]) -> dict[int, int]:
        return {0: 0} if _first_sizes(variables) == sizes else {}

    places, is_unsure = list(map(find_rows, operands)), False
    for k, kind in enumerate(call.kinds):
        is_by_chance = kind.is_const and call.retraced is None and places[k]
        if is_by_chance and not kind.is_flat(0, *sizes[0]):
            places[k], is_unsure = {}, True
    kinds = _by_rows(call, places, list(map(find_rows, results)))
    return [kind.but(power=None) for kind in kinds] if is_unsure else kinds


def _first_sizes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the first dimension of a value in each trace, as a tuple."""
    return [variable.aval.shape[:1] for variable in variables]


def cudnn(call: Call) -> list[Kind]:
    """Returns the `Kind` of each result of cuDNN's attention or LSTM."""
    operands, results = CUDNN[call.name]
    places = [{} if axis is None else {axis: 0} for axis in operands]
    return _by_rows(call, places, [{axis: 0} for axis in results])


def pallas(call: Call) -> list[Kind]:
    """Returns the `Kind` of each result of a Pallas kernel.

    `vmap` maps a kernel by adding a dimension to its grid. An entry of a result
    at some position along that dimension is computed only from the operands'
    entries at the same position.
    """
    mapping = call.params["grid_mapping"]
    kernels = {str(equation.params["jaxpr"]) for equation in call.equations}
    call.require(len(kernels) == 1 and not mapping.num_dynamic_grid_bounds)
    mapped = [_mapped_dims(block, mapping) for block in mapping.block_mappings]
    count = len(mapped) - len(call.equation.outvars)
    scalars: list[dict[int, int]] = [{}] * mapping.num_index_operands
    return _by_rows(call, scalars + mapped[:count], mapped[count:])


def _mapped_dims(block: Any, mapping: Any) -> dict[int, int]:
    """Returns the grid dimension for each block dimension that `vmap` added."""
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
    """Returns the `Kind` of each result, computed row by row from the operands.

    Args:
      call: The call of the kernel.
      operands: For each operand, a dict from its dimensions to those dimensions
        of the kernel's grid along which different positions are independent.
      results: For each result, a dict as in `operands`.
    """
    if all(kind.is_const for kind in call.kinds):
        return [join_plain(call.kinds)] * len(results)
    columns = list(enumerate(zip(call.kinds, operands, strict=True)))
    for kind in call.kinds:
        call.require(kind.is_const or (kind.is_rows and kind.outer == 1))
    dims = {
        places.get(kind.axis) for _, (kind, places) in columns if kind.is_rows
    }
    call.require(len(dims) == 1 and None not in dims)
    (dim,) = dims
    for k, (kind, places) in columns:
        for axis in (axis for axis, of in places.items() if of == dim):
            size = call.shape(k)[axis]
            call.require(kind.is_rows or size < 2 or kind.is_flat(axis, size))
    axes = [next((a for a, d in r.items() if d == dim), None) for r in results]
    power = 0.0 if all(kind.power is not None for kind in call.kinds) else None
    return [
        call.make_mixed() if axis is None else make_rows(axis, power=power)
        for axis in axes
    ]
