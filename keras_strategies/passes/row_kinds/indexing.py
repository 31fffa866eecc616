"""Rules for gathers and scatters.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import dataclasses

from keras_strategies.passes.row_kinds.call import (
    Call,
    join_plain,
    other_dims,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    SUM,
    Kind,
    at_axis,
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

    shapes: list[tuple[int, ...]]
    first: int
    axis: int


def compare_numbers(call: Call) -> Kind:
    """Returns the `Kind` of a comparison of scattered numbers (`Numbering`)."""
    k = 0 if call.kinds[0].is_rows else 1
    kind, other = call.kinds[k], call.kinds[1 - k]
    numbered: Numbering = kind.numbering
    if not other.is_zero:
        call.require(other.is_const and other.numbering == numbered.first)
        call.require(kind.axis == numbered.axis)
        for operand in range(2):
            call.require(call.shapes(operand) == numbered.shapes)
    return make_rows(kind.axis)


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
        call.require(operand.is_sum and index.is_const)
        return operand
    if operand.is_const:
        call.require(index.axis < len(call.shape(1)) - 1)
        batching = tuple(numbers.start_indices_batching_dims)
        if index.axis in batching:
            dim = numbers.operand_batching_dims[batching.index(index.axis)]
            size = call.shape(1)[index.axis] // index.outer
            call.require(operand.is_flat(dim, size))
        # If a dimension of the table grows with the number of rows, the table
        # has another size on a replica than on one device, so its entries must
        # be equal along that dimension.
        for dim in call.grown_dims():
            call.require(operand.is_flat(dim, call.shape()[dim]))
        power = scale_power(index.power, operand, call)
        return at_axis(index.but(power=power), places[index.axis])
    return _gathered_rows(call, places)


def _gathered_rows(call: Call, places: list[int]) -> Kind:
    operand, index = call.kinds[0].but(count=0), call.kinds[1]
    numbers = call.params["dimension_numbers"]
    if operand.numbering:
        is_filled = "FILL" in str(call.params["mode"])
        call.require(not (is_filled or index.is_random))
    axis, shape = operand.axis, call.shape()
    batching = tuple(numbers.operand_batching_dims)
    if axis in batching:
        # Each row of the result is gathered from the same row of the operand.
        dim = numbers.start_indices_batching_dims[batching.index(axis)]
        _require_rows_at(call, index, dim, operand)
        return at_axis(operand, places[dim])
    if axis not in numbers.collapsed_slice_dims:
        # Each slice contains all rows.
        is_all = call.params["slice_sizes"][axis] == shape[axis]
        call.require(index.is_const and is_all)
        kept = other_dims(shape, (*numbers.collapsed_slice_dims, *batching))
        return at_axis(operand, numbers.offset_dims[kept.index(axis)])
    column = tuple(numbers.start_index_map).index(axis)
    if index.is_rows and column in index.columns:
        # Each row reads the entry at its own row index.
        return at_axis(operand, places[index.axis])
    # If the rows are gathered in a random order, it is expected to differ
    # between replicas.
    matching = [p for p in places if call.out_shape()[p] == shape[axis]]
    call.require(index.is_random and bool(matching))
    return at_axis(operand, matching[0])


def _require_rows_at(call: Call, kind: Kind, dim: int, rows: Kind) -> None:
    """Requires that a value's rows are those of operand 0, or equal for all.

    Args:
      call: The call.
      kind: The kind of the value.
      dim: The value's dimension that must have the rows.
      rows: The kind of operand 0.
    """
    if kind.is_rows:
        call.require((kind.axis, kind.outer) == (dim, rows.outer))
    else:
        size = call.shape()[rows.axis] // rows.outer
        call.require(kind.is_flat(dim, size))


def scatter(call: Call) -> Kind:
    """Returns the `Kind` of the result of a scatter."""
    operand, index, update = call.kinds
    forms = [kind.form for kind in call.kinds]
    is_numbering = call.name == "scatter" and operand.is_zero
    if is_numbering and index.is_rows and update.numbering:
        return _scatter_numbers(call)
    if forms == [CONST] * 3:
        return _scattered_constants(call)
    call.require(SUM not in forms)
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
        call.require(index.is_rows and mapped.index(axis) in index.columns)
        place = _place_of_index(call, index.axis)
        return _if_rows_meet(call, operand, index.axis, place)
    place = numbers.update_window_dims[_window_dims(call).index(axis)]
    call.require(index.is_const and call.shape(2)[place] == shape[axis])
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
    if dim is not None:
        _require_rows_at(call, index, dim, operand)
    fits, _ = same_power(operand.power, update.power_in(call.ratio))
    call.require(fits or update.is_zero)
    if call.shape(2):
        _require_rows_at(call, update, place, operand)
    return operand.but(count=0)


def _scattered_into_constant(call: Call) -> Kind:
    """Returns the `Kind` of a constant into which rows are scattered.

    The result is `ROWS` if each row is written at its row index, `SUM` if rows
    are added to zeros independently of their order, else `MIXED`.
    """
    numbers = call.params["dimension_numbers"]
    operand, index, update = call.kinds
    if index.is_rows and index.axis < len(call.shape(1)) - 1:
        place = _place_of_index(call, index.axis)
        mapped = tuple(numbers.scatter_dims_to_operand_dims)
        dims = [mapped[c] for c in index.columns if c < len(mapped)]
        batching = tuple(numbers.scatter_indices_batching_dims)
        if index.axis in batching:
            dims = [numbers.operand_batching_dims[batching.index(index.axis)]]
        size = call.shape(1)[index.axis] // index.outer
        if dims and operand.is_flat(dims[0], size):
            power = update.power_in(call.ratio) if operand.is_zero else 0.0
            as_rows = make_rows(dims[0], index.outer, power)
            return _if_rows_meet(call, as_rows, index.axis, place)
        is_there = update.is_rows and update.axis == place
        is_flat = update.is_const and update.is_flat(place, size)
        call.require(is_there or is_flat)
    else:
        window = numbers.update_window_dims
        call.require(not index.is_rows)
        if update.axis in window:
            return _window_of_rows(call)
        dim = other_dims(call.shape(2), window).index(update.axis)
        call.require(index.is_flat(dim, call.shape(2)[update.axis]))
    call.require(call.name in ("scatter-add", "scatter_add"))
    call.require(operand.is_zero)
    return make_sum(update.power_in(call.ratio))


def _scatter_numbers(call: Call) -> Kind:
    """Returns the `Kind` of zeros into which numbers are scattered."""
    operand, index, update = call.kinds
    call.require(index.axis < len(call.shape(1)) - 1 and index.outer == 1)
    place = _place_of_index(call, index.axis)
    kinds = [operand, index, make_rows(place)]
    kind = _scattered_into_constant(dataclasses.replace(call, kinds=kinds))
    call.require(kind.is_rows)
    shapes, first = call.shapes(2), update.numbering
    return kind.but(numbering=Numbering(shapes=shapes, first=first, axis=place))


def _window_of_rows(call: Call) -> Kind:
    operand, _, update = call.kinds
    window = tuple(call.params["dimension_numbers"].update_window_dims)
    axis = _window_dims(call)[window.index(update.axis)]
    is_all = call.shape(2)[update.axis] == call.shape()[axis]
    size = call.shape()[axis] // update.outer
    call.require(is_all and operand.is_flat(axis, size))
    return at_axis(update.but(count=0), axis)
