"""Combines sums over the replicas that do not depend on each other.

Between processes, each array that is sent takes at least half a millisecond,
independent of its size (buffers.py). A step sums gradients where its optimizer
is called, and metrics, moving statistics and losses at its end, although most
of these could be summed together with the gradients. So the sums of a traced
step are computed in rounds, and the sums of one round are combined. A sum is in
round k if the longest chain of sums that it depends on has length k.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies._core.jaxprs import stages
from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._types import Array

Sum = Callable[[list[Any]], list[Any]]


def with_combined_sums(
    traced: ClosedJaxpr, axis: Axis, all_sum: Sum
) -> Callable[..., list[Any]]:
    """Returns a traced function in which sums over an axis are combined.

    Args:
      traced: The function. Its sums are not combined if it prints, calls back
        into Python or uses references.
      axis: The replica axis.
      all_sum: A function that sums arrays over the axis.

    Returns:
      A function that takes the flat inputs and returns the flat outputs.
    """
    equations = traced.jaxpr.eqns
    if any(map(stages.has_effects, equations)) or stages.has_references(
        traced.jaxpr
    ):
        return jaxpr_as_fun(traced)
    rounds = _rounds(equations, axis)
    if all(len(sums) < 2 for _, sums in rounds):
        return jaxpr_as_fun(traced)

    jaxpr = traced.jaxpr
    read = {id(v) for equation in equations for v in equation.invars}
    read |= set(map(id, jaxpr.outvars))

    def compute(*inputs: Array) -> list[Any]:
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        for computed, sums in rounds:
            outputs = [v for e in computed for v in e.outvars if id(v) in read]
            arrays = stages.compute_equations(
                jaxpr, computed, outputs, values.__getitem__
            )
            values.update(zip(outputs, arrays, strict=True))
            operands = [v for equation in sums for v in equation.invars]
            totals = all_sum([stages.value_of(v, values) for v in operands])
            results = [v for equation in sums for v in equation.outvars]
            values.update(zip(results, totals, strict=True))
        return [stages.value_of(v, values) for v in jaxpr.outvars]

    return compute


def _rounds(equations: Sequence[Any], axis: Axis) -> list[tuple[Any, Any]]:
    """Returns each round of sums, with the equations to compute before it."""
    waits: dict[Any, int] = {}
    computed, sums = collections.defaultdict(list), {}
    for equation in equations:
        operands = stages.variables(equation.invars)
        latest = max((waits.get(v, 0) for v in operands), default=0)
        is_sum = _is_sum(equation, axis)
        kind = sums.setdefault(latest, []) if is_sum else computed[latest]
        kind.append(equation)
        waits.update((v, latest + is_sum) for v in equation.outvars)
    last = max([*computed, *sums], default=0)
    return [(computed[k], sums.get(k, [])) for k in range(last + 1)]


def _is_sum(equation: JaxprEqn, axis: Axis) -> bool:
    return (
        equation.primitive.name == "psum"
        and equation.params["axes"] in ((axis,), axis)
        and equation.params["axis_index_groups"] is None
    )
