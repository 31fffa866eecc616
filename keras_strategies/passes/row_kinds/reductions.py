"""Rules for primitives that sum or compute along dimensions.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.passes.row_kinds.call import (
    Call,
    add_powers,
    at_axis,
    drop_dims,
    join_plain,
    kind_of_entries,
    other_dims,
    power_in,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    SUM,
    Kind,
    join_constants,
    make_rows,
    make_sum,
    make_uniform,
)


def reduce_sum(call: Call) -> Kind:
    """Returns the `Kind` of a sum over dimensions."""
    kind, axes = call.kinds[0], tuple(call.params["axes"])
    before = call.shape()
    if kind.is_const and kind.values is not None:
        counts = [
            math.prod(e.invars[0].aval.shape[axis] for axis in axes)
            for e in call.equations
        ]
        pairs = zip(kind.values, counts, strict=True)
        return make_uniform(tuple(v * c for v, c in pairs), call.out_shape())
    if kind.is_rows and kind.axis in axes:
        return make_sum(kind.power)
    if kind.is_const and kind.is_random and set(axes) & set(call.grown_dims()):
        return make_sum(kind.power)
    reduced = reduce(call)
    lost = set(axes) & set(call.grown_dims())
    if kind.is_const and lost:
        is_flat = all(kind.is_flat(axis, before[axis]) for axis in lost)
        power = power_in(kind, call) + len(lost) if is_flat else math.nan
        return reduced.but(power=power)
    count = math.prod(before[axis] for axis in axes) * max(kind.count, 1)
    return reduced.but(count=count)


def reduce(call: Call) -> Kind:
    """Returns the `Kind` of a reduction over dimensions other than the rows."""
    kind = call.kinds[0]
    if kind.is_sum and call.name != "reduce_sum":
        return call.make_mixed()
    entries = kind.entries if call.name == "reduce_prod" else None
    if entries is not None and call.shape() == (len(entries[0]),):
        # The product of a shape, by which Keras's losses divide.
        return make_uniform(tuple(map(math.prod, entries)), ())
    if call.name in ("reduce_prod", "argmax", "argmin", "reduce_xor"):
        is_one = math.prod(call.shape()) == math.prod(call.out_shape())
        if kind.is_const and not (is_one and "reduce" in call.name):
            kind = kind.but(values=None)
    if call.name not in ("reduce_max", "reduce_min"):
        kind = kind.but(indexed_dim=None)
    is_nonlinear = call.name != "reduce_sum" and kind.is_rows
    if is_nonlinear and kind.power not in (0.0, None):
        return call.make_mixed()
    return drop_dims(call, call.params["axes"], kind)


def make_dim_rule(find_axis: Callable[[Call], int]) -> Callable[[Call], Any]:
    """Makes the rule for primitives that compute along one dimension.

    The result is `MIXED` if this is the dimension of the rows.

    Args:
      find_axis: A function that returns this dimension for an equation.
    """

    def rule(call: Call) -> Kind:
        if call.name == "cumsum" and call.kinds[0].is_sum:
            return call.kinds[0].but(count=0)
        if any(kind.is_sum for kind in call.kinds):
            return call.make_mixed()
        axis = find_axis(call)
        for kind in call.kinds:
            if kind.is_rows and kind.axis == axis:
                return call.make_mixed()
        result = kind_of_entries(call)
        if result.is_const:
            blocks = {a: s for a, s in result.blocks.items() if a != axis}
            result = result.but(blocks=blocks, indexed_dim=None)
        return result

    return rule


def reduce_window(call: Call) -> Kind:
    """Returns the `Kind` of the result of a reduction over windows."""
    kind = call.kinds[0]
    if kind.is_const:
        return join_plain(call.kinds)
    if kind.is_sum or not _is_within_entries(call, kind.axis):
        return call.make_mixed()
    return at_axis(kind, kind.axis)


def _is_within_entries(call: Call, axis: int) -> bool:
    """Returns whether windows contain one entry along a dimension."""
    params = call.params
    neutral = [params["window_dimensions"][axis] == 1]
    neutral += [
        params[name][axis] == 1
        for name in ("window_strides", "base_dilation", "window_dilation")
        if params.get(name) is not None
    ]
    return all(neutral) and tuple(params["padding"][axis]) == (0, 0)


def scatter_to_selected(call: Call) -> Kind:
    """Returns the `Kind` of the gradient of a maximum over windows."""
    source, operand = call.kinds
    if source.is_const and operand.is_const:
        return join_plain(call.kinds)
    rows = operand if operand.is_rows else source
    if not (
        all(call.is_aligned(k, rows.axis, rows.outer) for k in range(2))
        and _is_within_entries(call, rows.axis)
    ):
        return call.make_mixed()
    return make_rows(rows.axis, rows.outer, source.power)


def reverse(call: Call) -> Kind:
    """Returns the `Kind` of the result of `rev`, which reverses dimensions."""
    kind = call.kinds[0]
    if kind.is_rows and kind.axis in call.params["dimensions"]:
        return call.make_mixed()
    if kind.is_const:
        return join_constants((kind,))
    return kind


def dot_general(call: Call) -> Kind:
    """Returns the `Kind` of the result of a `dot_general`."""
    one, two = call.kinds
    contracted, batch = call.params["dimension_numbers"]
    if one.is_const and two.is_const:
        blocks: dict[int, int] = {}
        for k, kind in enumerate(call.kinds):
            for dim, size in enumerate(call.shape(k)):
                place = _place_of_dim(call, k, dim)
                if place is not None:
                    known = size if kind.values else kind.blocks.get(dim, 1)
                    blocks[place] = math.gcd(blocks.get(place, known), known)
        return _multiply_constants(call, contracted[0], blocks)
    if SUM in (one.form, two.form):
        if CONST not in (one.form, two.form):
            return call.make_mixed()
        total, by = (one, two) if one.is_sum else (two, one)
        return make_sum(scale_power(total.power, by, call))
    places = [
        _place_of_dim(call, k, kind.axis) if kind.is_rows else None
        for k, kind in enumerate(call.kinds)
    ]
    if one.is_rows and two.is_rows:
        return _product_of_rows(call, places)
    k = 0 if one.is_rows else 1
    kind, other = call.kinds[k], call.kinds[1 - k]
    place = places[k]
    power = scale_power(kind.power, other, call)
    if place is not None and kind.axis in batch[k]:
        dim = batch[1 - k][batch[k].index(kind.axis)]
        if not other.is_flat(dim, call.shape(k)[kind.axis] // kind.outer):
            return call.make_mixed()
    if place is not None:
        scaled = kind.but(count=0, power=power)
        return at_axis(scaled, place)
    # A sum over the rows, weighted by a constant.
    dim = contracted[1 - k][contracted[k].index(kind.axis)]
    size = call.shape(k)[kind.axis] // kind.outer
    is_drawn_for_rows = other.is_random and dim in call.grown_dims(1 - k)
    is_fixed = not other.is_random and other.is_flat(dim, size)
    return (
        make_sum(power) if is_drawn_for_rows or is_fixed else call.make_mixed()
    )


def _multiply_constants(
    call: Call, contracted: Sequence[int], blocks: dict[int, int]
) -> Kind:
    """Returns the `Kind` of a product of constants.

    Args:
      call: The call.
      contracted: The dimensions of operand 0 that are summed.
      blocks: See `Kind`.
    """
    if any(kind.is_zero for kind in call.kinds):
        zeros = (0,) * len(call.equations)
        return make_uniform(zeros, call.out_shape())
    power = sum(power_in(kind, call) for kind in call.kinds)
    are_random = any(kind.is_random for kind in call.kinds)
    if are_random and set(contracted) & set(call.grown_dims()):
        # A sum over the rows of random numbers.
        return make_sum(power)
    product = join_plain(call.kinds).but(blocks=blocks)
    return product if call.retraced is None else product.but(power=power)


def _place_of_dim(call: Call, k: int, dim: int) -> int | None:
    """Returns the product's dimension that a dimension of operand `k` becomes.

    Returns None if the dimension is contracted.
    """
    contracted, batch = call.params["dimension_numbers"]
    if dim in contracted[k]:
        return None
    if dim in batch[k]:
        return batch[k].index(dim)

    def free(side: int) -> list[int]:
        used = (*contracted[side], *batch[side])
        return other_dims(call.shape(side), used)

    start = len(batch[0]) + (len(free(0)) if k == 1 else 0)
    return start + free(k).index(dim)


def _product_of_rows(call: Call, places: list[int | None]) -> Kind:
    one, two = call.kinds
    contracted, batch = call.params["dimension_numbers"]
    power = add_powers(call.kinds)
    is_paired = one.outer == two.outer
    for pairs in (contracted, batch):
        if one.axis in pairs[0]:
            is_paired &= pairs[1][pairs[0].index(one.axis)] == two.axis
            if not is_paired:
                return call.make_mixed()
            # If the rows are contracted, they are summed. If they are a batch
            # dimension, they remain rows.
            if pairs is contracted:
                return make_sum(power)
            return make_rows(places[0] or 0, one.outer, power)
    return call.make_mixed()


def convolution(call: Call) -> Kind:
    """Returns the `Kind` of a convolution."""
    image, kernel = call.kinds
    numbers = call.params["dimension_numbers"]
    if image.is_const and kernel.is_const:
        size = image.blocks.get(numbers.lhs_spec[0], 1)
        blocks = {numbers.out_spec[0]: size}
        return _multiply_constants(call, numbers.lhs_spec[1:2], blocks)
    if has_groups_of_rows(call):
        return make_rows(numbers.out_spec[1], power=_multiply_powers(call))
    if call.params["feature_group_count"] == 1:
        features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
        outers = {kind.outer for kind in call.kinds if kind.is_rows}
        if len(outers) == 1 and _are_aligned(call, features):
            # The gradient of a kernel: the rows take the place of features,
            # which are summed.
            return make_sum(_multiply_powers(call))
    is_plain = image.is_rows and kernel.is_const
    is_plain &= call.params["batch_group_count"] == 1
    if not is_plain or image.axis != numbers.lhs_spec[0]:
        return call.make_mixed()
    power = scale_power(image.power, kernel, call)
    scaled = image.but(count=0, power=power)
    return at_axis(scaled, numbers.out_spec[0])


def has_groups_of_rows(call: Call) -> bool:
    """Returns whether each row has its own groups of a convolution.

    The image's features (or its batch, in the gradient of a kernel), the
    kernel's output features and those of the result consist of consecutive
    parts, one for each group. So the rows must be these dimensions, in their
    order, and each must have the same number of groups.
    """
    if not any(kind.is_rows for kind in call.kinds):
        return False
    numbers, params = call.params["dimension_numbers"], call.params
    image_dim = numbers.lhs_spec[0 if params["batch_group_count"] > 1 else 1]
    groups = [max(e.params[name] for name in GROUPS) for e in call.equations]
    sizes = (call.num_rows, round(call.num_rows * call.ratio))
    parts = {count / rows for count, rows in zip(groups, sizes, strict=False)}
    return (
        call.num_rows > 1
        and len(parts) == 1
        and parts.pop().is_integer()
        and _are_aligned(call, (image_dim, numbers.rhs_spec[0]), 1)
    )


def _are_aligned(
    call: Call, axes: Sequence[int], outer: int | None = None
) -> bool:
    """Returns whether operands have their rows, if any, at dimensions."""
    return not any(kind.is_random for kind in call.kinds) and all(
        call.is_aligned(k, axis, outer) for k, axis in enumerate(axes)
    )


GROUPS = ("feature_group_count", "batch_group_count")
"""The numbers of groups of a convolution, one of which is always 1."""


def _multiply_powers(call: Call) -> float | None:
    image, kernel = call.kinds
    if image.is_const:
        return scale_power(kernel.power, image, call)
    if kernel.is_const:
        return scale_power(image.power, kernel, call)
    return add_powers(call.kinds)
