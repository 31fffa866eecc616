"""Sums over the replicas that do not wait for each other, sent together.

Between processes each array that is sent costs half a millisecond or more,
whatever its size (buffers.py). A step sums gradients where its optimizer is
called, and metrics, moving statistics and losses at its end; most of those are
known as early as the gradients are. So the sums of a traced step are made
together, all that wait for equally many sums before them.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.jaxprs.stages import acts, has_references

Sum = Callable[[list[Any]], list[Any]]


def with_combined_sums(
    traced: ClosedJaxpr, axis: Axis, all_sum: Sum
) -> Callable[..., list[Any]]:
    """The traced function with fewer sums over an axis.

    Args:
      traced: The function; as it is where it prints or calls Python.
      axis: The replica axis.
      all_sum: Sums arrays over the axis.

    Returns:
      A function of the flat inputs that returns the flat outputs.
    """
    equations = traced.jaxpr.eqns
    if any(map(acts, equations)) or has_references(traced.jaxpr):
        return jaxpr_as_fun(traced)
    rounds = _rounds(equations, axis)
    if all(len(sums) < 2 for _, sums in rounds):
        return jaxpr_as_fun(traced)

    jaxpr = traced.jaxpr
    read = {id(v) for equation in equations for v in equation.invars}
    read |= set(map(id, jaxpr.outvars))

    def combined(*inputs: Any) -> list[Any]:
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        for computed, sums in rounds:
            made = [v for e in computed for v in e.outvars if id(v) in read]
            _compute(traced, computed, made, values)
            operands = [v for equation in sums for v in equation.invars]
            totals = all_sum([_value(v, values) for v in operands])
            results = [v for equation in sums for v in equation.outvars]
            values.update(zip(results, totals, strict=True))
        return [_value(v, values) for v in jaxpr.outvars]

    return combined


def _rounds(equations: Sequence[Any], axis: Axis) -> list[tuple[Any, Any]]:
    """What is computed before each round of sums, and the round."""
    waits: dict[Any, int] = {}
    computed, sums = collections.defaultdict(list), {}
    for equation in equations:
        operands = [v for v in equation.invars if not isinstance(v, Literal)]
        latest = max((waits.get(v, 0) for v in operands), default=0)
        is_sum = _is_sum(equation, axis)
        kind = sums.setdefault(latest, []) if is_sum else computed[latest]
        kind.append(equation)
        waits.update((v, latest + is_sum) for v in equation.outvars)
    last = max([*computed, *sums], default=0)
    return [(computed[k], sums.get(k, [])) for k in range(last + 1)]


def _is_sum(equation: Any, axis: Axis) -> bool:
    return (
        equation.primitive.name == "psum"
        and equation.params["axes"] in ((axis,), axis)
        and equation.params["axis_index_groups"] is None
    )


def _compute(
    traced: ClosedJaxpr,
    equations: list[Any],
    made: list[Any],
    values: dict[Any, Any],
) -> None:
    """Computes equations, in their order; adds what they make to `values`."""
    used = [v for equation in equations for v in equation.invars]
    own = set(made)
    given = dict.fromkeys(
        v for v in used if not isinstance(v, Literal) and v not in own
    )
    jaxpr = traced.jaxpr.replace(
        constvars=[], invars=list(given), outvars=made, eqns=equations
    )
    part = jaxpr_as_fun(traced.replace(jaxpr=jaxpr, consts=[]))
    values.update(zip(made, part(*[values[v] for v in given]), strict=True))


def _value(variable: Any, values: dict[Any, Any]) -> Any:
    return variable.val if isinstance(variable, Literal) else values[variable]
