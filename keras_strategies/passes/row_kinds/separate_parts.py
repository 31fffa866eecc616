"""Parts of a step whose author says that they compute each row by itself.

The operands and results of such a part are marked in the trace (see
`mark_part`). What the analysis shows of a result is kept. A result of which it
shows nothing, such as that of a kernel, is believed to have an entry for each
row, which depends only on this row of the operands, and on operands without
rows. In the derivatives of the part, a cotangent of an operand with rows has an
entry for each row, too. The derivative of another operand is a sum over the
rows.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from keras_strategies._types import Array, Equation
from keras_strategies.passes import stages
from keras_strategies.passes.row_kinds.call import Call
from keras_strategies.passes.row_kinds.kinds import (
    Kind,
    make_rows,
    make_sum,
)
from keras_strategies.passes.row_kinds.marks import make_identity


def mark_part(
    part: Callable[..., Sequence[Array]], operands: Sequence[Array], name: str
) -> list[Any]:
    """Computes `part(*operands)` as a part that computes each row by itself.

    Args:
      part: A function that returns a list of arrays. It captures no arrays.
      operands: Its operands. Those with rows have them in their first
        dimension, as all results have.
      name: A name of the part. Parts with the same name and with operands of
        the same shapes are believed only together.

    Returns:
      The results.
    """
    key = f"{name} {[str(jax.typeof(operand)) for operand in operands]}"

    def mark(value: Array, *, is_operand: bool) -> Any:
        return part_p.bind(
            value, key=key, is_operand=is_operand, enters=is_operand, order=0
        )

    def separate_part(*operands: Array) -> list[Any]:
        return list(part(*operands))

    separate_part.__name__ = _NAME
    marked = [mark(v, is_operand=True) for v in operands]
    results = jax.jit(separate_part)(*marked)
    return [mark(v, is_operand=False) for v in results]


def is_part(equation: Equation) -> bool:
    """Returns whether an equation computes a marked part, or its derivative."""
    return equation.params.get("name") == _NAME


def has_other_code(equations: Sequence[Any]) -> bool:
    """Returns whether the traces of a part consist of other equations.

    A part may compute some numbers of rows in another way, such as loops that
    compute several rows in each iteration.
    """
    if not is_part(equations[0]):
        return False
    names = [
        [inner.primitive.name for inner in stages.equations_in(equation)]
        for equation in equations
    ]
    return names[0] != names[-1]


_NAME = "ks.separate_part"


def _jvp(primals: Any, tangents: Any, *, order: int, **params: Any) -> Any:
    (value,), (tangent,) = primals, tangents
    marked = part_p.bind(value, order=order, **params)
    return marked, part_p.bind(tangent, order=order + 1, **params)


def _transpose(
    cotangent: Any, value: Any, *, enters: bool, **params: Any
) -> list[Any]:
    return [part_p.bind(cotangent, enters=not enters, **params)]


part_p = make_identity("ks_separate_part")
ad.deflinear2(part_p, _transpose)
ad.primitive_jvps[part_p] = _jvp


class SeparateParts:
    """The kinds of what enters and leaves the parts of a step."""

    def __init__(self) -> None:
        # The equations that mark what enters the parts with one key.
        self._entered: dict[str, list[Call]] = collections.defaultdict(list)
        # The keys of parts that are differentiated twice, and not believed.
        self._doubted: set[str] = set()

    def find_kind(self, call: Call) -> Kind:
        """Returns the `Kind` of a marked value."""
        (kind,), params, key = call.kinds, call.params, call.params["key"]
        if params["order"] > 1:
            # A derivative may be a product of two that enter, so the exponent
            # of the number of rows is unknown.
            self._doubted.add(key)
        elif params["enters"]:
            self._entered[key].append(call)
        elif kind.is_mixed and kind.power is None and key not in self._doubted:
            return _believe(call, self._entered[key])
        return kind


def _believe(call: Call, entered: list[Call]) -> Kind:
    """Returns the believed `Kind` of a mixed value that leaves a part."""
    # A result does not depend on the tangents and cotangents that enter.
    entered = [c for c in entered if c.params["order"] <= call.params["order"]]
    operands = [c for c in entered if c.params["order"] == 0]
    derivatives = [c for c in entered if c.params["order"] == 1]
    rows = {
        (c.kinds[0].outer, _first_sizes(c))
        for c in entered
        if c.kinds[0].is_rows
    }
    are_separate = all(map(_is_separate, entered))
    are_plain = all(c.kinds[0].is_plain for c in operands)
    powers = {
        c.kinds[0].power_in(c.ratio)
        for c in derivatives
        if not c.kinds[0].is_zero
    }
    if call.retraced is None:
        # Another trace shows which dimensions have the rows.
        powers = {None}
    if len(rows) != 1 or len(powers) > 1 or not (are_separate and are_plain):
        return call.kinds[0]
    power = powers.pop() if powers else 0.0
    ((outer, sizes),) = rows
    if _first_sizes(call) == sizes and len(call.grown_dims()) < 2:
        return make_rows(0, outer, power)
    is_sum = call.params["is_operand"] and not call.grown_dims()
    return make_sum(power) if is_sum else call.kinds[0]


def _first_sizes(call: Call) -> tuple[tuple[int, ...], ...]:
    """Returns the first dimension of a marked value in each trace."""
    return tuple(e.invars[0].aval.shape[:1] for e in call.equations)


def _is_separate(call: Call) -> bool:
    """Returns whether a value has rows in order, or is equal for all rows."""
    kind = call.kinds[0]
    if kind.is_const:
        return all(kind.is_flat(d, call.shape()[d]) for d in call.grown_dims())
    return kind.is_rows and kind.axis == 0
