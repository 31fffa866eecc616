"""Rules for primitives that compute along dimensions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from keras_strategies._core.row_kinds.call import (
    Call,
    at_axis,
    joined_plain,
    kind_of_entries,
    moved,
)
from keras_strategies._core.row_kinds.kinds import (
    CONST,
    ROWS,
    SUM,
    Kind,
    joined_constants,
    summed,
    uniform,
)


def reduce_sum(call: Call) -> Kind:
    kind, axes = call.kinds[0], tuple(call.params["axes"])
    before = call.shape()
    if kind.form == CONST and kind.values is not None:
        counts = [
            math.prod(e.invars[0].aval.shape[axis] for axis in axes)
            for e in call.equations
        ]
        pairs = zip(kind.values, counts, strict=True)
        return uniform(tuple(v * c for v, c in pairs), call.out_shape())
    if kind.form == ROWS and kind.axis in axes:
        return summed(kind.power)
    if kind.form == CONST and kind.is_random and call.grows(axes):
        return summed(kind.power)
    reduced = reduce(call)
    count = math.prod(before[axis] for axis in axes) * max(kind.count, 1)
    return dataclasses.replace(reduced, count=count)


def reduce(call: Call) -> Kind:
    """A reduction over other dimensions than that of the rows."""
    axes = tuple(call.params["axes"])
    kept = [a for a in range(len(call.shape())) if a not in axes]
    kind = call.kinds[0]
    if kind.form == SUM and call.name != "reduce_sum":
        return call.mixed()
    if call.name in ("reduce_prod", "argmax", "argmin", "reduce_xor"):
        is_one = math.prod(call.shape()) == math.prod(call.out_shape())
        if kind.form == CONST and not (is_one and "reduce" in call.name):
            kind = dataclasses.replace(kind, values=None)
    if call.name not in ("reduce_max", "reduce_min"):
        kind = dataclasses.replace(kind, index_of=None)
    is_nonlinear = call.name != "reduce_sum" and kind.form == ROWS
    if is_nonlinear and kind.power not in (0.0, None):
        return call.mixed()
    return moved(
        call, lambda axis: kept.index(axis) if axis in kept else None, kind
    )


def along(axis_of: Callable[[Call], int]) -> Callable[[Call], Any]:
    """The rule of what computes along a dimension, which is not the rows'."""

    def rule(call: Call) -> Any:
        if any(kind.form == SUM for kind in call.kinds):
            return call.mixed()
        axis = axis_of(call)
        for kind in call.kinds:
            if kind.form == ROWS and kind.axis == axis:
                return call.mixed()
        found = kind_of_entries(call)
        if found.form == CONST:
            blocks = {a: s for a, s in found.blocks.items() if a != axis}
            found = dataclasses.replace(found, blocks=blocks, index_of=None)
        return found

    return rule


def reduce_window(call: Call) -> Kind:
    kind = call.kinds[0]
    if kind.form == CONST:
        return joined_plain(call.kinds)
    if kind.form == SUM:
        return call.mixed()
    params, axis = call.params, kind.axis
    neutral = [params["window_dimensions"][axis] == 1]
    neutral += [
        params[name][axis] == 1
        for name in ("window_strides", "base_dilation", "window_dilation")
        if params.get(name) is not None
    ]
    neutral.append(tuple(params["padding"][axis]) == (0, 0))
    return at_axis(kind, axis) if all(neutral) else call.mixed()


def reverse(call: Call) -> Kind:
    kind = call.kinds[0]
    if kind.form == ROWS and kind.axis in call.params["dimensions"]:
        return call.mixed()
    if kind.form == CONST:
        return joined_constants((kind,))
    return kind
