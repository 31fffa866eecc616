"""The degrees of a loss in the rows: a mean over them, or not.

The mean of the replicas' losses is the whole batch's loss where that is a
mean over rows, plus what knows no rows. A sum is not, and no loss that mixes
rows. Twice the same rows leave a mean as it is and double a sum: a value that
is multiplied by 2**d is of degree d here. The degrees follow from two traces,
of a number of rows and of twice as many, equation by equation: constants tell
theirs by their two values, reductions by their two shapes. Values of different
degrees cannot be added, and have no logarithm: then the loss is none at all.

This is dimensional analysis, with the row as the only unit. It is silent about
what it does not know (`None`): loops over rows, sorts, scatters.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from keras_strategies.keras_bridge.row_checks.row_primitives import (
    ADDS,
    BENT,
    FORGETS,
    KEEPS,
    LOOPS,
    Kind,
)

EXACT = "ks_share_of_a_sum"
"""The name, in traces, of a sum that is known to be a replica's share."""

_FEW = 16
"""Entries of constants that are looked at: shapes, and numbers."""

_UNKNOWN = Kind(degree=None)
_MIXED = Kind(degree=None, is_mixed=True)
_PLAIN = Kind()
_SHARED = Kind(is_shared=True)


def is_no_mean(
    small: Any, large: Any, loss: int, data: Collection[int]
) -> bool:
    """Whether a loss is certainly no mean over the rows.

    Args:
      small: A trace of the step; closed.
      large: The same with twice the rows.
      loss: Which of the outputs the loss is.
      data: Which of the inputs have rows.
    """
    inner, other = small.jaxpr, large.jaxpr
    consts = [
        _constant(*pair)
        for pair in zip(small.consts, large.consts, strict=True)
    ]
    inputs = [
        _PLAIN if k in data else _SHARED for k in range(len(inner.invars))
    ]
    (kind,) = _kinds(inner, other, consts, inputs, [loss])
    if kind.is_mixed:
        return True
    return not kind.is_whole and kind.degree not in (None, 0.0)


def needed_for(jaxpr: Any, outputs: Sequence[Any]) -> list[Any]:
    """The equations that outputs are computed by, in their order."""
    wanted = set(variables_of(outputs))
    found = []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            found.append(equation)
            wanted.update(variables_of(equation.invars))
    return found[::-1]


def variables_of(values: Sequence[Any]) -> list[Any]:
    """Inputs or outputs of an equation, without constants."""
    return [v for v in values if not isinstance(v, Literal)]


_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
}
"""Primitives that call a trace as it is, and their parameter that has it."""


def trace_called(equation: Any) -> tuple[Any, list[Any]] | None:
    """The trace that an equation calls on its inputs, and its constants."""
    called = equation.params.get(_CALLS.get(equation.primitive.name))
    if called is None:
        return None
    inner = getattr(called, "jaxpr", called)
    consts = list(getattr(called, "consts", ()))
    is_known = len(consts) == len(inner.constvars)
    if not is_known or len(inner.invars) != len(equation.invars):
        return None
    return inner, consts


def _kinds(
    small: Any,
    large: Any,
    consts: list[Kind],
    inputs: list[Kind],
    outputs: Sequence[int],
) -> list[Kind]:
    """What is known of some outputs of two traces of one function."""
    if len(small.eqns) != len(large.eqns):
        return [_UNKNOWN] * len(outputs)
    wanted = [small.outvars[k] for k in outputs]
    needed = {id(e) for e in needed_for(small, wanted)}
    env: dict[Any, Kind] = dict(zip(small.constvars, consts, strict=True))
    env |= dict(zip(small.invars, inputs, strict=True))

    def read(var: Any, twin: Any) -> Kind:
        if isinstance(var, Literal):
            is_twin = isinstance(twin, Literal)
            return _constant(var.val, twin.val) if is_twin else _UNKNOWN
        return env.get(var, _UNKNOWN)

    for one, two in zip(small.eqns, large.eqns, strict=True):
        if id(one) not in needed:
            continue
        if one.primitive is not two.primitive:
            return [_UNKNOWN] * len(outputs)
        kinds = [read(*p) for p in zip(one.invars, two.invars, strict=True)]
        found = _of_equation(one, two, kinds)
        env |= dict(zip(one.outvars, found, strict=True))
    return [
        read(var, large.outvars[k])
        for k, var in zip(outputs, wanted, strict=True)
    ]


def _constant(one: Any, two: Any) -> Kind:
    if np.size(one) > _FEW or np.shape(one) != np.shape(two):
        # A table, a mask: none of them counts rows.
        return _SHARED
    try:
        values = np.asarray(one, float), np.asarray(two, float)
    except (TypeError, ValueError):
        return _SHARED
    ratios = {
        math.log2(b / a) if 0 < a * b < math.inf else 0.0
        for a, b in zip(*(v.ravel().tolist() for v in values), strict=True)
    }
    # A shape is of no degree, and its numbers are.
    degree = ratios.pop() if len(ratios) == 1 else None
    return Kind(degree=degree, is_shared=True, values=values)


def _of_equation(one: Any, two: Any, kinds: list[Kind]) -> list[Kind]:
    name = one.primitive.name
    num = len(one.outvars)
    if one.params.get("name") == EXACT or name == "axis_index":
        return [_PLAIN] * num
    folded = _folded(one, two, kinds)
    if folded is not None:
        return [folded]
    inner, other = trace_called(one), trace_called(two)
    if inner is not None and other is not None:
        pairs = zip(inner[1], other[1], strict=True)
        consts = [_constant(*pair) for pair in pairs]
        return _kinds(inner[0], other[0], consts, kinds, range(num))
    if name == "eq" and any(kind.degree != 0 for kind in kinds):
        # It may choose rows by places that were counted, each once.
        return [_UNKNOWN] * num
    if name in FORGETS:
        return [_joined(kinds)] * num
    if any(kind.is_mixed for kind in kinds):
        return [_MIXED] * num
    if name in KEEPS:
        return [_without_value(kinds[0])] * num
    rule = _RULES.get(name)
    if rule is not None:
        return [rule(one, two, kinds)] * num
    if all(kind.degree == 0 for kind in kinds) and name not in LOOPS:
        # Whatever it is, entry by entry or within a row.
        return [_joined(kinds)] * num
    return [_UNKNOWN] * num


def _folded(one: Any, two: Any, kinds: list[Kind]) -> Kind | None:
    """A constant that follows from constants."""
    is_small = len(one.outvars) == 1 and one.outvars[0].aval.size <= _FEW
    if not is_small or not kinds or any(k.values is None for k in kinds):
        return None
    results = []
    for equation, which in ((one, 0), (two, 1)):
        try:
            with jax.ensure_compile_time_eval():
                values = [
                    jnp.asarray(values[which], var.aval.dtype)
                    for values, var in zip(
                        (kind.values or () for kind in kinds),
                        equation.invars,
                        strict=True,
                    )
                ]
                results.append(np.asarray(_computed(equation, values)))
        except Exception:
            return None
    return _constant(*results)


def _computed(equation: Any, values: list[Any]) -> Any:
    if trace_called(equation) is not None:
        closed = equation.params[_CALLS[equation.primitive.name]]
        return jaxpr_as_fun(closed)(*values)[0]
    return equation.primitive.bind(*values, **equation.params)


def _without_value(kind: Kind) -> Kind:
    return kind if kind.is_any else dataclasses.replace(kind, values=None)


def _joined(kinds: Sequence[Kind]) -> Kind:
    """Of degree 0, and whole where all are that depend on rows."""
    return Kind(
        is_whole=_are_whole(kinds),
        is_shared=all(kind.is_shared for kind in kinds),
    )


def _are_whole(kinds: Sequence[Kind]) -> bool:
    of_rows = [kind for kind in kinds if not kind.is_shared]
    return bool(of_rows) and all(kind.is_whole for kind in of_rows)


def _degree(kind: Kind, kinds: Sequence[Kind]) -> float | None:
    """Beside a replica's own values what is whole is of no degree."""
    return 0.0 if kind.is_whole and not _are_whole(kinds) else kind.degree


def _added(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    counted = [k for k in kinds if not k.is_any]
    name = one.primitive.name
    if len(counted) > 1 and name in ("add", "sub", "max", "min", "select_n"):
        # What keeps from zero, or from too much, is of no degree.
        variable = [k for k in counted if k.values is None]
        is_bound = name not in ("add", "sub")
        counted = [
            k
            for k in counted
            if k.values is None or not (k.is_tiny or is_bound) or not variable
        ]
    if not counted:
        return _without_value(kinds[0])
    degrees = {_degree(kind, counted) for kind in counted}
    if None in degrees:
        return _UNKNOWN
    if len(degrees) > 1:
        return _nothing_or(counted)
    return dataclasses.replace(_joined(counted), degree=degrees.pop())


def _nothing_or(kinds: Sequence[Kind]) -> Kind:
    """What has no degree: a fault where it is a replica's own."""
    if _are_whole(kinds):
        return Kind(is_whole=True)
    if all(kind.is_shared for kind in kinds):
        return Kind(degree=None, is_shared=True)
    return _MIXED


def _selected(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    return _added(one, two, kinds[1:])


def _clamped(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    return _without_value(kinds[1])


def _multiplied(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    if any(kind.is_any for kind in kinds):
        return _constant(0.0, 0.0)
    return _product(kinds, operator.add)


def _divided(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    return _product(kinds, operator.sub)


def _product(kinds: list[Kind], combine: Callable[[Any, Any], float]) -> Kind:
    degrees = [_degree(kind, kinds) for kind in kinds]
    if None in degrees:
        return _UNKNOWN
    return dataclasses.replace(_joined(kinds), degree=combine(*degrees))


def _contracted(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    product = _multiplied(one, two, kinds)
    if product.degree is None or product.is_whole:
        return product
    (dims, _), _ = one.params["dimension_numbers"]
    ratio = _ratio(one, two, dims)
    return dataclasses.replace(product, degree=product.degree + ratio)


_Rule = Callable[[Any, Any, list[Kind]], Kind]


def _changed(change: Callable[[Any, Any, float], float]) -> _Rule:
    """The rule that gives the first input's kind another degree."""

    def rule(one: Any, two: Any, kinds: list[Kind]) -> Kind:
        kind = _without_value(kinds[0])
        if kind.degree is None or kind.is_any:
            return kind
        return dataclasses.replace(kind, degree=change(one, two, kind.degree))

    return rule


def _summed(axes: Callable[[Any], Sequence[int]]) -> _Rule:
    return _changed(lambda one, two, d: d + _ratio(one, two, axes(one)))


def _power(of: Callable[[Any], float]) -> _Rule:
    return _changed(lambda one, two, degree: degree * of(one))


def _ratio(one: Any, two: Any, dims: Sequence[int]) -> float:
    """How much more is added up in the larger trace, by powers of 2."""
    counts = [
        math.prod(equation.invars[0].aval.shape[dim] for dim in dims)
        for equation in (one, two)
    ]
    return math.log2(counts[1] / counts[0]) if all(counts) else 0.0


def _bent(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    """A function that is linear in nothing."""
    kind = kinds[0]
    if kind.degree is None:
        return _UNKNOWN
    if kind.degree == 0 or kind.is_any:
        return _joined(kinds)
    return _nothing_or(kinds)


def _picked(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    """Entries of the first, chosen by the others: an embedding's rows."""
    return dataclasses.replace(_joined(kinds), degree=kinds[0].degree)


def _gathered(one: Any, two: Any, kinds: list[Kind]) -> Kind:
    return dataclasses.replace(
        _without_value(kinds[0]), is_whole=True, is_shared=False
    )


_RULES: dict[str, _Rule] = {
    "select_n": _selected,
    "clamp": _clamped,
    "mul": _multiplied,
    "div": _divided,
    "dot_general": _contracted,
    "conv_general_dilated": _multiplied,
    "reduce_sum": _summed(lambda equation: equation.params["axes"]),
    "cumsum": _summed(lambda equation: (equation.params["axis"],)),
    "square": _power(lambda equation: 2.0),
    "sqrt": _power(lambda equation: 0.5),
    "rsqrt": _power(lambda equation: -0.5),
    "integer_pow": _power(lambda equation: float(equation.params["y"])),
    "gather": _picked,
    "dynamic_slice": _picked,
    "all_gather": _gathered,
    "all_gather_invariant": _gathered,
    **dict.fromkeys(ADDS, _added),
    **dict.fromkeys(BENT, _bent),
}
