"""Rules for gathers and scatters.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import dataclasses

from keras_strategies.passes.row_kinds.call import (
    Call,
    at_axis,
    join_plain,
    other_dims,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    SUM,
    Kind,
    is_constant,
    make_rows,
    make_sum,
    same_power,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbering:
    """An array that numbers its entries, to see which of them were scattered.

    The gradient of a scatter that sets entries scatters such numbers. It only
    compares them with each other and with zero. So what it computes for a row
    does not depend on the row's place, although the numbers do.

    Attributes:
      shapes: The array's shape in each of the traces.
      first: The first number.
      axis: The dimension of the rows.
    """

    shapes: tuple[tuple[int, ...], ...]
    first: int
    axis: int


def compare_numbers(call: Call) -> Kind:
    """Returns the `Kind` of a comparison of scattered numbers (`Numbering`)."""
    row_operands = [k for k, kind in enumerate(call.kinds) if kind.is_rows]
    k, other = row_operands[0], call.kinds[1 - row_operands[0]]
    kind = call.kinds[k]
    numbered: Numbering = kind.numbering
    is_same = (
        other.is_const
        and other.numbering == numbered.first
        and kind.axis == numbered.axis
        and all(
            _shapes(call, operand) == numbered.shapes for operand in range(2)
        )
    )
    return (
        make_rows(kind.axis) if other.is_zero or is_same else call.make_mixed()
    )


def _shapes(call: Call, k: int) -> tuple[tuple[int, ...], ...]:
    return tuple(equation.invars[k].aval.shape for equation in call.equations)


def gather(call: Call) -> Kind:
    """Returns the `Kind` of the result of a gather."""
    operand, index = call.kinds
    numbers = call.params["dimension_numbers"]
    places = other_dims(call.out_shape(), numbers.offset_dims)
    if operand.is_const and index.is_const:
        shape = call.shape(1)[:-1]
        blocks = {
            places[dim]: size if index.values else index.blocks.get(dim, 1)
            for dim, size in enumerate(shape)
        }
        return join_plain(call.kinds).but(blocks=blocks)
    if operand.is_sum or index.is_sum:
        is_fixed = operand.is_sum and index.is_const
        return operand if is_fixed else call.make_mixed()
    if operand.is_const:
        is_row = index.axis < len(call.shape(1)) - 1
        batching = tuple(numbers.start_indices_batching_dims)
        if index.axis in batching:
            dim = numbers.operand_batching_dims[batching.index(index.axis)]
            size = call.shape(1)[index.axis] // index.outer
            is_row &= operand.is_flat(dim, size)
        # If a dimension of the table grows with the number of rows, the table
        # has another size on a replica than on one device, so its entries must
        # be equal along that dimension.
        is_row &= all(
            operand.is_flat(dim, call.shape()[dim]) for dim in call.grown_dims()
        )
        if not is_row:
            return call.make_mixed()
        power = scale_power(index.power, operand, call)
        return at_axis(index.but(power=power), places[index.axis])
    return _gathered_rows(call, places)


def _gathered_rows(call: Call, places: list[int]) -> Kind:
    operand, index = call.kinds[0].but(count=0), call.kinds[1]
    numbers = call.params["dimension_numbers"]
    is_filled = "FILL" in str(call.params["mode"])
    if operand.numbering and (is_filled or index.is_random):
        return call.make_mixed()
    axis, shape = operand.axis, call.shape()
    batching = tuple(numbers.operand_batching_dims)
    if axis in batching:
        # Each row of the result is gathered from the same row of the operand.
        dim = numbers.start_indices_batching_dims[batching.index(axis)]
        size = shape[axis] // operand.outer
        if index.is_rows:
            fits = (index.axis, index.outer) == (dim, operand.outer)
        else:
            fits = index.is_flat(dim, size)
        return at_axis(operand, places[dim]) if fits else call.make_mixed()
    if axis not in numbers.collapsed_slice_dims:
        # Each slice contains all rows.
        is_all = call.params["slice_sizes"][axis] == shape[axis]
        if not (index.is_const and is_all):
            return call.make_mixed()
        gone = (*numbers.collapsed_slice_dims, *batching)
        kept = other_dims(shape, gone)
        return at_axis(operand, numbers.offset_dims[kept.index(axis)])
    column = tuple(numbers.start_index_map).index(axis)
    if index.is_rows and column in index.columns:
        # Each row reads the entry at its own row index.
        return at_axis(operand, places[index.axis])
    if index.is_random:
        # The rows are gathered in a random order, which is expected to differ
        # between replicas.
        sizes = [call.out_shape()[place] for place in places]
        for place, size in zip(places, sizes, strict=True):
            if size == shape[axis]:
                return at_axis(operand, place)
    return call.make_mixed()


def scatter(call: Call) -> Kind:
    """Returns the `Kind` of the result of a scatter."""
    operand, index, update = call.kinds
    forms = [kind.form for kind in call.kinds]
    is_numbering = call.name == "scatter" and operand.is_zero
    if is_numbering and index.is_rows and update.numbering:
        return _scatter_numbers(call)
    if forms == [CONST] * 3:
        return _scattered_constants(call)
    if SUM in forms:
        return call.make_mixed()
    if operand.is_const:
        return _scattered_into_constant(call)
    numbers = call.params["dimension_numbers"]
    axis, shape = operand.axis, call.shape()
    batching = tuple(numbers.operand_batching_dims)
    if axis in batching:
        dim = numbers.scatter_indices_batching_dims[batching.index(axis)]
        return _if_rows_meet(call, operand, dim, _place_of_index(call, dim))
    if axis in numbers.inserted_window_dims:
        mapped = tuple(numbers.scatter_dims_to_operand_dims)
        is_own_row = index.is_rows and mapped.index(axis) in index.columns
        if not is_own_row:
            return call.make_mixed()
        place = _place_of_index(call, index.axis)
        return _if_rows_meet(call, operand, index.axis, place)
    place = numbers.update_window_dims[_window_dims(call).index(axis)]
    is_all = call.shape(2)[place] == shape[axis]
    if not (index.is_const and is_all):
        return call.make_mixed()
    return _if_rows_meet(call, operand, None, place)


def _scattered_constants(call: Call) -> Kind:
    """Returns the `Kind` of a constant updated by constants.

    The entries of the result are equal along dimensions that each update covers
    completely.
    """
    operand, _, update = call.kinds
    numbers = call.params["dimension_numbers"]
    shape, blocks = call.shape(), {}
    places = zip(_window_dims(call), numbers.update_window_dims, strict=True)
    for dim, place in places:
        is_all = call.shape(2)[place] == shape[dim]
        if is_all and update.is_flat(place, shape[dim]):
            known = operand.values is not None
            blocks[dim] = shape[dim] if known else operand.blocks.get(dim, 1)
    return join_plain(call.kinds).but(blocks=blocks)


def _window_dims(call: Call) -> list[int]:
    """Returns the operand's dimensions that a scatter's windows cover."""
    numbers = call.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return other_dims(call.shape(), gone)


def _place_of_index(call: Call, dim: int) -> int:
    """Returns the dimension of the updates that is `dim` of the indices."""
    window = call.params["dimension_numbers"].update_window_dims
    return other_dims(call.shape(2), window)[dim]


def _if_rows_meet(
    call: Call, operand: Kind, dim: int | None, place: int
) -> Kind:
    """Returns the operand's kind, or `MIXED` if a row updates another row."""
    _, index, update = call.kinds
    size = call.shape()[operand.axis] // operand.outer
    fits = True
    if dim is not None and index.is_rows:
        fits = (index.axis, index.outer) == (dim, operand.outer)
    elif dim is not None:
        fits = index.is_flat(dim, size)
    if update.is_rows:
        fits &= (update.axis, update.outer) == (place, operand.outer)
        fits &= same_power(operand.power, update.power)[0]
    else:
        is_plain = operand.power in (0.0, None) and is_constant(update)
        fits &= update.is_zero or is_plain
        fits &= not call.shape(2) or update.is_flat(place, size)
    return operand.but(count=0) if fits else call.make_mixed()


def _scattered_into_constant(call: Call) -> Kind:
    """Returns the `Kind` of a constant into which rows are scattered.

    The result is `ROWS` if each row is written at its row index, `SUM` if rows
    are added to zeros independently of their order, else `MIXED`.
    """
    numbers = call.params["dimension_numbers"]
    operand, index, update = call.kinds
    index_has_rows = index.is_rows
    if index_has_rows and index.axis < len(call.shape(1)) - 1:
        place = _place_of_index(call, index.axis)
        mapped = tuple(numbers.scatter_dims_to_operand_dims)
        dims = [mapped[c] for c in index.columns if c < len(mapped)]
        batching = tuple(numbers.scatter_indices_batching_dims)
        if index.axis in batching:
            at = batching.index(index.axis)
            dims = [numbers.operand_batching_dims[at]]
        size = call.shape(1)[index.axis] // index.outer
        if dims and operand.is_flat(dims[0], size):
            power = update.power if operand.is_zero else 0.0
            as_rows = make_rows(dims[0], index.outer, power)
            return _if_rows_meet(call, as_rows, index.axis, place)
        fits = (
            update.is_flat(place, size)
            if update.is_const
            else update.axis == place
        )
    else:
        window = numbers.update_window_dims
        if not index_has_rows and update.axis in window:
            return _window_of_rows(call)
        fits = not index_has_rows
        if fits:
            dim = other_dims(call.shape(2), window).index(update.axis)
            fits = index.is_flat(dim, call.shape(2)[update.axis])
    is_sum = call.name in ("scatter-add", "scatter_add") and operand.is_zero
    power = update.power if update.is_rows else 0.0
    return make_sum(power) if fits and is_sum else call.make_mixed()


def _scatter_numbers(call: Call) -> Kind:
    """Returns the `Kind` of zeros into which numbers are scattered."""
    operand, index, update = call.kinds
    if index.axis == len(call.shape(1)) - 1 or index.outer > 1:
        return call.make_mixed()
    place = _place_of_index(call, index.axis)
    kinds = [operand, index, make_rows(place)]
    kind = _scattered_into_constant(dataclasses.replace(call, kinds=kinds))
    numbering = Numbering(
        shapes=_shapes(call, 2), first=update.numbering, axis=place
    )
    return kind.but(numbering=numbering) if kind.is_rows else call.make_mixed()


def _window_of_rows(call: Call) -> Kind:
    operand, _, update = call.kinds
    window = tuple(call.params["dimension_numbers"].update_window_dims)
    axis = _window_dims(call)[window.index(update.axis)]
    is_all = call.shape(2)[update.axis] == call.shape()[axis]
    size = call.shape()[axis] // update.outer
    if not is_all or not operand.is_flat(axis, size):
        return call.make_mixed()
    return at_axis(update.but(count=0), axis)
