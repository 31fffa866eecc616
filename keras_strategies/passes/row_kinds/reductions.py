"""Rules for primitives that sum or compute along dimensions.

A rule returns the kind of a result (see `kinds`), given the kinds of the
operands.
"""

import math
from collections.abc import Sequence

from keras_strategies.passes.constrained_operations import window_dims
from keras_strategies.passes.row_kinds.call import (
    Call,
    add_powers,
    drop_dims,
    join_plain,
    kind_of_entries,
    other_dims,
    scale_power,
)
from keras_strategies.passes.row_kinds.kinds import (
    CONST,
    SUM,
    Kind,
    at_axis,
    join_constants,
    make_rows,
    make_sum,
    make_uniform,
)


def reduce_sum(call: Call) -> Kind:
    """Returns the `Kind` of a sum over dimensions."""
    kind, axes = call.kinds[0], tuple(call.params["axes"])
    before = call.shape()
    if kind.values is not None:
        counts = [math.prod(s[axis] for axis in axes) for s in call.shapes()]
        pairs = zip(kind.values, counts, strict=True)
        return make_uniform(tuple(v * c for v, c in pairs), call.out_shape())
    if kind.is_rows and kind.axis in axes:
        return make_sum(kind.power)
    lost = set(axes) & set(call.grown_dims())
    if kind.is_const and kind.is_random and lost:
        return make_sum(kind.power)
    reduced = reduce(call)
    if kind.is_const and lost:
        is_flat = all(kind.is_flat(axis, before[axis]) for axis in lost)
        power = kind.power_in(call.ratio) if is_flat else math.nan
        return reduced.but(power=power + len(lost))
    count = math.prod(before[axis] for axis in axes) * max(kind.count, 1)
    return reduced.but(count=count)


def reduce(call: Call) -> Kind:
    """Returns the `Kind` of a reduction over dimensions other than the rows."""
    kind, is_linear = call.kinds[0], call.name == "reduce_sum"
    call.require(is_linear or not kind.is_sum)
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
    call.require(is_linear or kind.is_const or kind.is_plain)
    return drop_dims(call, call.params["axes"], kind)


def compute_along(call: Call) -> Kind:
    """Returns the `Kind` of what is computed along a dimension without rows."""
    if call.name == "cumsum" and call.kinds[0].is_sum:
        return call.kinds[0]
    params = call.params
    # Without such a parameter, it is the last dimension.
    axis = params.get("dimension", params.get("axis", -1)) % len(call.shape())
    for kind in call.kinds:
        call.require(kind.is_const or (kind.is_rows and kind.axis != axis))
    result = kind_of_entries(call)
    if not result.is_const:
        return result
    blocks = {a: s for a, s in result.blocks.items() if a != axis}
    return result.but(blocks=blocks, indexed_dim=None)


def reduce_window(call: Call) -> Kind:
    """Returns the `Kind` of the result of a reduction over windows."""
    kind = call.kinds[0]
    if kind.is_const:
        return join_plain(call.kinds)
    call.require(kind.is_rows and kind.axis not in window_dims(call.equation))
    return at_axis(kind, kind.axis)


def scatter_to_selected(call: Call) -> Kind:
    """Returns the `Kind` of the gradient of a maximum over windows."""
    source, operand = call.kinds
    if source.is_const and operand.is_const:
        return join_plain(call.kinds)
    rows = operand if operand.is_rows else source
    for k in range(2):
        call.require(call.is_aligned(k, rows.axis, rows.outer))
    call.require(rows.axis not in window_dims(call.equation))
    return make_rows(rows.axis, rows.outer, source.power)


def reverse(call: Call) -> Kind:
    """Returns the `Kind` of the result of `rev`, which reverses dimensions."""
    kind = call.kinds[0]
    if kind.is_const:
        return join_constants((kind,))
    call.require(kind.is_sum or kind.axis not in call.params["dimensions"])
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
    power = _multiply_powers(call)
    if SUM in (one.form, two.form):
        call.require(CONST in (one.form, two.form))
        return make_sum(power)
    k = 0 if one.is_rows else 1
    kind, other = call.kinds[k], call.kinds[1 - k]
    place = _place_of_dim(call, k, kind.axis)
    # The other operand's dimension that is multiplied with the rows, if any.
    pairs = contracted if place is None else batch
    dim = dict(zip(pairs[k], pairs[1 - k], strict=True)).get(kind.axis)
    size = call.shape(k)[kind.axis] // kind.outer
    if other.is_rows:
        call.require((other.axis, other.outer) == (dim, kind.outer))
    elif place is None and other.is_random:
        call.require(dim in call.grown_dims(1 - k))
    else:
        call.require(dim is None or other.is_flat(dim, size))
    # If the rows are contracted, they are summed.
    if place is None:
        return make_sum(power)
    return at_axis(kind.but(count=0, power=power), place)


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
    product = join_plain(call.kinds).but(blocks=blocks)
    if call.retraced is None:
        return product
    power = sum(kind.power_in(call.ratio) for kind in call.kinds)
    if product.is_random and set(contracted) & set(call.grown_dims()):
        # A sum over the rows of random numbers.
        return make_sum(power)
    return product.but(power=power)


def _place_of_dim(call: Call, k: int, dim: int) -> int | None:
    """Returns the product's dimension that a dimension of operand `k` becomes.

    Returns None if the dimension is contracted.
    """
    contracted, batch = call.params["dimension_numbers"]
    free = [
        other_dims(call.shape(side), (*contracted[side], *batch[side]))
        for side in range(2)
    ]
    skipped = [None] * len(free[0]) if k else []
    places = [*batch[k], *skipped, *free[k]]
    return places.index(dim) if dim in places else None


def convolution(call: Call) -> Kind:
    """Returns the `Kind` of a convolution."""
    image, kernel = call.kinds
    numbers = call.params["dimension_numbers"]
    if image.is_const and kernel.is_const:
        size = image.blocks.get(numbers.lhs_spec[0], 1)
        blocks = {numbers.out_spec[0]: size}
        return _multiply_constants(call, numbers.lhs_spec[1:2], blocks)
    power = _multiply_powers(call)
    if has_groups_of_rows(call):
        return make_rows(numbers.out_spec[1], power=power)
    if call.params["feature_group_count"] == 1:
        features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
        outers = {kind.outer for kind in call.kinds if kind.is_rows}
        if len(outers) == 1 and _are_aligned(call, features):
            # The gradient of a kernel: the rows take the place of features,
            # which are summed.
            return make_sum(power)
    call.require(image.is_rows and kernel.is_const)
    call.require(call.params["batch_group_count"] == 1)
    call.require(image.axis == numbers.lhs_spec[0])
    return at_axis(image.but(count=0, power=power), numbers.out_spec[0])


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
    """Returns the exponent of a product, one factor of which is no constant."""
    one, two = call.kinds
    if one.is_const:
        return scale_power(two.power, one, call)
    if two.is_const:
        return scale_power(one.power, two, call)
    return add_powers(call.kinds)
