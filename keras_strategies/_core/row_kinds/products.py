"""Rules for products, convolutions and what computes on matrices."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from keras_strategies._core.row_kinds.call import (
    Call,
    at_axis,
    joined_plain,
    scaled_power,
    sum_of_powers,
)
from keras_strategies._core.row_kinds.kinds import (
    CONST,
    ROWS,
    SUM,
    Kind,
    rows,
    summed,
    uniform,
)


def dot_general(call: Call) -> Kind:
    one, two = call.kinds
    contracted, batch = call.params["dimension_numbers"]
    if one.form == CONST and two.form == CONST:
        return _constant_product(call, contracted, batch)
    if SUM in (one.form, two.form):
        if CONST not in (one.form, two.form):
            return call.mixed()
        total, by = (one, two) if one.form == SUM else (two, one)
        return summed(scaled_power(total.power, by, call))
    places = [_place_in_product(call, k, contracted, batch) for k in range(2)]
    if one.form == ROWS and two.form == ROWS:
        return _product_of_rows(call, places, contracted, batch)
    k = 0 if one.form == ROWS else 1
    kind, other = call.kinds[k], call.kinds[1 - k]
    place = places[k]
    power = scaled_power(kind.power, other, call)
    if place is not None and kind.axis in batch[k]:
        dim = batch[1 - k][batch[k].index(kind.axis)]
        if not other.is_flat(dim, call.shape(k)[kind.axis] // kind.outer):
            return call.mixed()
    if place is not None:
        scaled = dataclasses.replace(kind, count=0, power=power)
        return at_axis(scaled, place)
    # A sum over the rows, weighted by a constant.
    dim = contracted[1 - k][contracted[k].index(kind.axis)]
    size = call.shape(k)[kind.axis] // kind.outer
    if other.is_random or not other.is_flat(dim, size):
        return call.mixed()
    return summed(power)


def _constant_product(call: Call, contracted: Any, batch: Any) -> Kind:
    if any(kind.is_zero for kind in call.kinds):
        zeros = (0,) * len(call.equations)
        return uniform(zeros, call.out_shape())
    blocks: dict[int, int] = {}
    for k, kind in enumerate(call.kinds):
        for dim, size in enumerate(call.shape(k)):
            place = _place_of_dim(call, k, dim, contracted, batch)
            if place is not None:
                known = size if kind.values else kind.blocks.get(dim, 1)
                blocks[place] = math.gcd(blocks.get(place, known), known)
    return dataclasses.replace(joined_plain(call.kinds), blocks=blocks)


def _place_in_product(
    call: Call, k: int, contracted: Any, batch: Any
) -> int | None:
    """The dimension of a product that operand `k`'s rows have; or None."""
    kind = call.kinds[k]
    if kind.form != ROWS:
        return None
    return _place_of_dim(call, k, kind.axis, contracted, batch)


def _place_of_dim(
    call: Call, k: int, dim: int, contracted: Any, batch: Any
) -> int | None:
    """The dimension of a product that a dimension of operand `k` becomes."""
    if dim in contracted[k]:
        return None
    if dim in batch[k]:
        return batch[k].index(dim)

    def free(side: int) -> list[int]:
        dims = range(len(call.shape(side)))
        taken = (*contracted[side], *batch[side])
        return [d for d in dims if d not in taken]

    start = len(batch[0]) + (len(free(0)) if k == 1 else 0)
    return start + free(k).index(dim)


def _product_of_rows(
    call: Call, places: list[int | None], contracted: Any, batch: Any
) -> Kind:
    one, two = call.kinds
    power = sum_of_powers(call.kinds)
    is_alike = one.outer == two.outer
    for pairs in (contracted, batch):
        if one.axis in pairs[0]:
            is_alike &= pairs[1][pairs[0].index(one.axis)] == two.axis
            if not is_alike:
                return call.mixed()
            if pairs is contracted:
                return summed(power)
            return rows(places[0] or 0, one.outer, power)
    return call.mixed()


def convolution(call: Call) -> Kind:
    image, kernel = call.kinds
    numbers = call.params["dimension_numbers"]
    if image.form == CONST and kernel.form == CONST:
        if image.is_zero:
            return uniform(image.values, call.out_shape())
        size = image.blocks.get(numbers.lhs_spec[0], 1)
        blocks = {numbers.out_spec[0]: size}
        return dataclasses.replace(joined_plain(call.kinds), blocks=blocks)
    is_plain = image.form == ROWS and kernel.form == CONST
    is_plain &= call.params["batch_group_count"] == 1
    if not is_plain or image.axis != numbers.lhs_spec[0]:
        return call.mixed()
    power = scaled_power(image.power, kernel, call)
    scaled = dataclasses.replace(image, count=0, power=power)
    return at_axis(scaled, numbers.out_spec[0])


def of_matrices(dims: int) -> Callable[[Call], list[Kind]]:
    """The rule of what computes on the last dimensions of each operand."""

    def rule(call: Call) -> list[Kind]:
        for k, kind in enumerate(call.kinds):
            is_within = kind.axis >= len(call.shape(k)) - dims
            if kind.form == SUM or (kind.form == ROWS and is_within):
                return [call.mixed()] * len(call.equation.outvars)
        of_rows = [kind for kind in call.kinds if kind.form == ROWS]
        if not of_rows:
            return [joined_plain(call.kinds)] * len(call.equation.outvars)
        first = of_rows[0]
        alike = all(
            (kind.axis, kind.outer) == (first.axis, first.outer)
            for kind in of_rows
        )
        constants = [
            kind.is_flat(first.axis, call.shape(k)[first.axis])
            for k, kind in enumerate(call.kinds)
            if kind.form == CONST and len(call.shape(k)) > first.axis
        ]
        is_known = all(kind.power is not None for kind in of_rows)
        result = rows(first.axis, first.outer, 0.0 if is_known else None)
        is_fine = alike and all(constants)
        found = result if is_fine else call.mixed()
        return [found] * len(call.equation.outvars)

    return rule
