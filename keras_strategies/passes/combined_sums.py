"""Combines sums over the replicas that do not depend on each other.

Between CPU devices, each array that is sent takes a fixed time, independent of
its size (buffers.py). A step sums gradients where its optimizer is called, and
metrics, moving statistics and losses at its end, although most of these could
be summed together with the gradients. So the sums of a traced step are computed
in rounds, and the sums of one round are combined. A sum is in round k if the
longest chain of sums that it depends on has length k.

A round may contain sums that are computed only under a condition. The other
sums of the round are then computed in both branches: together with them, or
without.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies._types import Array
from keras_strategies.passes import stages
from keras_strategies.passes.specs import Axis

Sum = Callable[[list[Any]], list[Any]]

PACK = "ks_pack"
UNPACK = "ks_unpack"
"""The names of the functions that fill and read a buffer, in traces."""


def with_combined_sums(
    traced: ClosedJaxpr,
    axis: Axis,
    all_sum: Sum,
    is_conditional: Callable[[Any], bool],
    fits: Callable[[list[Any]], bool],
) -> Callable[..., list[Any]]:
    """Returns a traced function in which sums over an axis are combined.

    Args:
      traced: The function. Its sums are not combined if it prints, calls back
        into Python or uses references.
      axis: The replica axis.
      all_sum: A function that sums arrays over the axis.
      is_conditional: A function that returns whether an equation is a call
        whose last equation is a `cond` of two branches: the first computes
        arrays, the second one sums these arrays.
      fits: A function that returns whether the arrays of a round, given as
        `aval`s, may be summed together. If not, no sums are combined.

    Returns:
      A function that takes the flat inputs and returns the flat outputs.
    """
    equations = traced.jaxpr.eqns
    if any(map(stages.has_effects, equations)) or stages.has_references(
        traced.jaxpr
    ):
        return jaxpr_as_fun(traced)
    equations = stages.needed_equations(
        list(_without_buffers(equations, axis)),
        traced.jaxpr.outvars,
        is_kept=lambda equation: False,
    )
    rounds = _rounds(equations, axis, is_conditional)
    summed = [[v.aval for e in sums for v in e.outvars] for _, sums in rounds]
    are_combined = any(len(sums) > 1 for _, sums in rounds)
    if not are_combined or not all(map(fits, summed)):
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
            totals = _compute_sums(sums, values, all_sum)
            results = [v for equation in sums for v in equation.outvars]
            values.update(zip(results, totals, strict=True))
        return [stages.read_value(v, values) for v in jaxpr.outvars]

    return compute


def _compute_sums(
    sums: Sequence[Any], values: Mapping[Any, Any], all_sum: Sum
) -> list[Any]:
    """Computes the sums of a round, of which the first may be conditional."""
    has_condition = bool(sums) and not _is_psum(sums[0])
    plain = sums[1:] if has_condition else sums
    operands = [v for equation in plain for v in equation.invars]
    summands = [stages.read_value(v, values) for v in operands]
    if not has_condition:
        return all_sum(summands)
    call = sums[0]
    traced = call.params["jaxpr"]
    *before, branch = traced.jaxpr.eqns
    inner = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    inputs = [stages.read_value(v, values) for v in call.invars]
    inner |= zip(traced.jaxpr.invars, inputs, strict=True)
    results = [v for equation in before for v in equation.outvars]
    arrays = stages.compute_equations(
        traced.jaxpr, before, results, inner.__getitem__
    )
    inner |= zip(results, arrays, strict=True)
    index, *read = [stages.read_value(v, inner) for v in branch.invars]
    compute, compute_sums = map(jaxpr_as_fun, branch.params["branches"])
    is_rounded = _sums_in_other_dtype(branch.params["branches"][1])

    def sum_all(read: list[Any], summands: list[Any]) -> list[Any]:
        if is_rounded:
            return [*compute_sums(*read), *all_sum(summands)]
        return all_sum([*compute(*read), *summands])

    def sum_plain(read: list[Any], summands: list[Any]) -> list[Any]:
        return [*compute(*read), *all_sum(summands)]

    return jax.lax.switch(index, [sum_plain, sum_all], read, summands)


def _sums_in_other_dtype(traced: ClosedJaxpr) -> bool:
    """Returns whether a function sums its results in a dtype of its own."""
    sums = filter(_is_psum, stages.all_equations(traced))
    sent = {v.aval.dtype for equation in sums for v in equation.invars}
    return sent != {aval.dtype for aval in traced.out_avals}


def _rounds(
    equations: Sequence[Any],
    axis: Axis,
    is_conditional: Callable[[Any], bool],
) -> list[tuple[Any, Any]]:
    """Returns each round of sums, with the equations to compute before it.

    The first sum of a round may be conditional.
    """
    waits: dict[Any, int] = {}
    computed, sums = collections.defaultdict(list), {}
    for equation in equations:
        operands = stages.variables(equation.invars)
        latest = max((waits.get(v, 0) for v in operands), default=0)
        round_sums = sums.setdefault(latest, [])
        is_sum = _is_sum(equation, axis)
        if is_sum:
            round_sums.append(equation)
        elif is_conditional(equation) and all(map(_is_psum, round_sums[:1])):
            round_sums.insert(0, equation)
            is_sum = True
        else:
            computed[latest].append(equation)
        waits.update((v, latest + is_sum) for v in equation.outvars)
    last = max([*computed, *sums], default=0)
    return [(computed[k], sums.get(k, [])) for k in range(last + 1)]


def _without_buffers(equations: Sequence[Any], axis: Axis) -> Iterator[Any]:
    """Adds sums of the arrays that share a buffer, in place of reading it.

    These arrays can then share a buffer with those of other sums.
    """
    packs, unpacks = {}, {}
    for equation in equations:
        name = equation.params.get("name")
        if name == PACK and _is_buffer(equation.outvars, equation.invars):
            packs[id(equation.outvars[0])] = equation
        if name == UNPACK and _is_buffer(equation.invars, equation.outvars):
            unpacks[id(equation.invars[0])] = equation
    replaced: set[int] = set()
    for equation in equations:
        if id(equation) in replaced:
            continue
        yield equation
        filled = read = None
        if _is_sum(equation, axis) and len(equation.invars) == 1:
            filled = packs.get(id(equation.invars[0]))
            read = unpacks.get(id(equation.outvars[0]))
        if filled and read and _shapes(filled.invars) == _shapes(read.outvars):
            replaced.add(id(read))
            yield equation.replace(invars=filled.invars, outvars=read.outvars)


def _is_buffer(buffers: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Returns whether variables are one buffer, which consists of the arrays.

    They are not if `pack` or `unpack` was batched, transposed or pruned.
    """
    size = sum(array.aval.size for array in arrays)
    return [buffer.aval.shape for buffer in buffers] == [(size,)]


def _shapes(variables: Sequence[Any]) -> list[Any]:
    return [(v.aval.shape, v.aval.dtype) for v in variables]


def _is_sum(equation: JaxprEqn, axis: Axis) -> bool:
    return (
        _is_psum(equation)
        and equation.params["axes"] in ((axis,), axis)
        and equation.params["axis_index_groups"] is None
    )


def _is_psum(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "psum"
