"""Rules for primitives that reshape, join or slice arrays.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import math
from typing import Any

from keras_strategies.passes.row_kinds.call import (
    Call,
    drop_dims,
    join_all,
    join_plain,
    kind_of_entries,
    move_dims,
    other_dims,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    ROWS,
    SUM,
    Kind,
    at_axis,
    is_constant,
    join,
    join_constants,
    make_uniform,
    same_power,
)


def broadcast(call: Call) -> Kind:
    places = call.params["broadcast_dimensions"]
    before, after = call.shape(), call.out_shape()
    kind = call.kinds[0]
    if kind.is_rows:
        # A single row may be repeated along a dimension that is not the
        # dimension of the rows.
        call.require(before[kind.axis] == after[places[kind.axis]])
    result = move_dims(call, lambda axis: places[axis])
    if result.is_rows and places == tuple(range(len(before))):
        return result.but(columns=kind.columns)
    if not result.is_const or result.values is not None:
        return result
    blocks = dict(result.blocks)
    for axis, size in enumerate(after):
        if axis not in places or before[places.index(axis)] != size:
            blocks[axis] = size
    return result.but(blocks=blocks)


def reshape(call: Call) -> Kind:
    before, after = call.shape(), call.out_shape()
    kind, order = call.kinds[0], call.params["dimensions"]
    if order is not None:
        # The operand is transposed first.
        before = tuple(before[dim] for dim in order)
        kind = move_dims(call, tuple(order).index)
    if kind.is_const and kind.blocks == dict(enumerate(before)):
        return kind.but(blocks=dict(enumerate(after)))
    if not kind.is_rows:
        starts = {}
        for axis, size in enumerate(after):
            starts.setdefault((math.prod(after[:axis]), size), axis)
        moved = move_dims(
            call,
            lambda axis: starts.get((math.prod(before[:axis]), before[axis])),
            kind,
        )
        return moved if order else moved.but(numbering=kind.numbering)
    # A reshape keeps the row-major order of the entries, so it does not change
    # the number of blocks that each contain all rows, which is `outer`. After
    # the reshape, this number is the product of the sizes of the dimensions
    # before the new row dimension (`ahead`) and of the number of blocks within
    # that dimension (`within`).
    outer = math.prod(before[: kind.axis]) * kind.outer
    candidates = []
    for axis, size in enumerate(after):
        ahead = math.prod(after[:axis])
        if ahead and outer % ahead == 0:
            within = outer // ahead
            if size % (within * call.num_rows) == 0 and size:
                candidates.append((axis, within))
    if call.num_rows > 1:
        candidates = candidates[:1]
    call.require(len(candidates) == 1)
    return at_axis(kind, *candidates[0])


def transpose(call: Call) -> Kind:
    return move_dims(call, call.params["permutation"].index)


def squeeze(call: Call) -> Kind:
    return drop_dims(call, call.params["dimensions"])


def expand_dims(call: Call) -> Kind:
    kept = other_dims(call.out_shape(), call.params["dimensions"])
    return move_dims(call, lambda axis: kept[axis])


def stack(call: Call) -> Kind:
    dim = call.params["axis"]
    kind = kind_of_entries(call)
    if kind.is_const:
        kind = kind.but(values=None)
    return move_dims(call, lambda axis: axis + (axis >= dim), kind)


def unstack(call: Call) -> list[Kind]:
    """Returns the `Kind` of each entry along a dimension (JAX 0.12)."""
    dims = [call.params["axis"]]
    outputs = range(len(call.equation.outvars))
    return [drop_dims(call, dims, out=k) for k in outputs]


def slice_(call: Call) -> Kind:
    params, kind = call.params, call.kinds[0]
    if not kind.is_rows:
        return _part_of_constant(call)
    axis, strides = kind.axis, params["strides"]
    start, stop = params["start_indices"][axis], params["limit_indices"][axis]
    step = 1 if strides is None else strides[axis]
    return _part(call, _with_columns(call, kind), start, stop, step)


def _with_columns(call: Call, kind: Kind, out: int = 0) -> Kind:
    """Returns a `ROWS` kind, without `columns` if some columns are cut off."""
    is_all = call.shape()[-1:] == call.out_shape(out)[-1:]
    return kind if is_all else kind.but(columns=frozenset())


def _part(call: Call, kind: Kind, start: int, stop: int, step: int) -> Kind:
    """Returns the `Kind` of a slice along the dimension of the rows.

    The slice must consist of complete blocks of rows, else the result is
    `MIXED`.
    """
    size = call.shape()[kind.axis]
    if (start, stop, step) == (0, size, 1):
        return kind
    block = size // kind.outer
    if step == 1 and start % block == 0 and stop % block == 0 and stop > start:
        return at_axis(kind, kind.axis, (stop - start) // block)
    return call.make_mixed()


def _part_of_constant(call: Call, out: int = 0) -> Kind:
    """Returns the `Kind` that results from slicing a constant or a sum."""
    kind, before = call.kinds[0], call.shape()
    after = call.out_shape(out)
    result = move_dims(call, lambda axis: axis, out=out)
    if not result.is_const or result.values is not None:
        return result
    blocks = {
        axis: after[axis] if size == before[axis] else 1
        for axis, size in kind.blocks.items()
    }
    indexed_dim = kind.indexed_dim
    if indexed_dim is not None and before[indexed_dim] != after[indexed_dim]:
        indexed_dim = None
    return result.but(blocks=blocks, indexed_dim=indexed_dim)


def split(call: Call) -> list[Kind]:
    axis, sizes = call.params["axis"], call.params["sizes"]
    kind, results, start = call.kinds[0], [], 0
    for k, size in enumerate(sizes):
        if not kind.is_rows:
            results.append(_part_of_constant(call, k))
        elif kind.axis != axis:
            results.append(_with_columns(call, kind, k))
        else:
            results.append(_part(call, kind, start, start + size, 1))
        start += size
    return results


def concatenate(call: Call) -> Kind:
    dim, kinds = call.params["dimension"], call.kinds
    forms = {kind.form for kind in kinds}
    if SUM in forms:
        call.require(ROWS not in forms)
        return join_all(kinds, call)
    sizes = [call.shape(k)[dim] for k in range(len(kinds))]
    if ROWS not in forms:
        return _concatenated_constants(call, dim, sizes)
    k, first = next((k, f) for k, f in enumerate(kinds) if f.is_rows)
    same = [same_power(first.power, f.power)[0] for f in kinds]
    if first.axis != dim:
        return _concatenate_columns(call, first, all(same))
    # The concatenation is along the dimension of the rows. Each operand must
    # consist of complete blocks of rows, or of a constant that is equal within
    # such blocks.
    block = sizes[k] // first.outer // call.num_rows * call.num_rows
    for kind, size in zip(kinds, sizes, strict=True):
        if kind.is_rows:
            call.require(kind.axis == dim and size == kind.outer * block)
        else:
            call.require(size % block == 0 and kind.is_flat(dim, block))
    call.require(all(same))
    return at_axis(first, dim, sum(sizes) // block)


def _concatenated_constants(call: Call, dim: int, sizes: list[int]) -> Kind:
    joint = join_constants(call.kinds)
    blocks = dict(joint.blocks)
    within: list[Any] = [
        size if kind.values is not None else kind.blocks.get(dim)
        for kind, size in zip(call.kinds, sizes, strict=True)
    ]
    if None not in within:
        blocks[dim] = math.gcd(*within)
    values = {kind.values for kind in call.kinds}
    if len(values) == 1 and None not in values:
        return make_uniform(values.pop(), call.out_shape())
    return joint.but(blocks=blocks)


def _concatenate_columns(call: Call, first: Kind, same: bool) -> Kind:
    """Returns the `Kind` of a concatenation along a dimension without rows.

    Args:
      call: The call.
      first: The kind of the first operand of the form `ROWS`.
      same: Whether the operands' exponents (`Kind.power`) are equal.
    """
    axis, columns, start = first.axis, set(), 0
    is_last = call.params["dimension"] == len(call.out_shape()) - 1
    for k, kind in enumerate(call.kinds):
        size = call.shape(k)[axis] // first.outer
        is_index = kind.indexed_dim == axis and first.outer == 1
        if kind.is_rows:
            same &= (kind.axis, kind.outer) == (axis, first.outer)
            columns |= {start + column for column in kind.columns}
        elif is_index and is_last and call.shape(k)[-1] == 1:
            columns.add(start)
        else:
            same &= kind.is_flat(axis, size)
        start += call.shape(k)[-1] if call.shape(k) else 0
    call.require(same)
    known = frozenset(columns) if is_last else frozenset()
    return first.but(columns=known, count=0)


def tile(call: Call) -> Kind:
    kind, times = call.kinds[0], call.params["reps"]
    if kind.is_rows:
        return at_axis(kind, kind.axis, kind.outer * times[kind.axis])
    if kind.is_sum or kind.values is not None:
        return move_dims(call, lambda axis: axis)
    before, after = call.shape(), call.out_shape()
    blocks = {
        axis: after[axis] if before[axis] in (1, size) else size
        for axis, size in kind.blocks.items()
    }
    blocks |= {a: after[a] for a, size in enumerate(before) if size == 1}
    return kind.but(blocks=blocks, indexed_dim=None, numbering=None)


def pad(call: Call) -> Kind:
    kind, fill = call.kinds
    added = call.params["padding_config"]
    if kind.is_const:
        blocks = {a: s for a, s in kind.blocks.items() if not any(added[a])}
        return join_plain(call.kinds).but(blocks=blocks)
    if kind.is_sum:
        call.require(fill.is_zero)
        return kind
    call.require(added[kind.axis] == (0, 0, 0))
    is_plain = kind.is_plain and fill.is_const and is_constant(fill)
    call.require(fill.is_zero or is_plain)
    return kind.but(count=0)


def iota(call: Call) -> Kind:
    dim, shape = call.params["dimension"], call.out_shape()
    blocks = {a: s for a, s in enumerate(shape) if a != dim}
    has_place = len(shape) == 1 and call.params["dtype"].itemsize >= 4
    numbering = 0 if has_place else None
    return Kind(form=CONST, blocks=blocks, indexed_dim=dim, numbering=numbering)


def dynamic_slice(call: Call) -> Kind:
    kind, *starts = call.kinds
    call.require(all(start.is_const for start in starts))
    if not kind.is_rows:
        return _part_of_constant(call)
    call.require(call.out_shape()[kind.axis] == call.shape()[kind.axis])
    return _with_columns(call, kind).but(count=0)


def dynamic_update_slice(call: Call) -> Kind:
    kind, update, *starts = call.kinds
    call.require(all(start.is_const for start in starts))
    if kind.is_const and update.is_const:
        result = join_constants((kind, update))
        size, part = call.shape(), call.shape(1)
        blocks = {a: s for a, s in result.blocks.items() if size[a] == part[a]}
        return result.but(blocks=blocks)
    of = kind if kind.is_rows else update
    if of.is_rows:
        call.require(call.shape(1)[of.axis] == call.shape()[of.axis])
    return join(kind, update, call.out_shape(), call.equation)
