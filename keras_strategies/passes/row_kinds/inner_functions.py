"""Functions in a trace that are not analyzed as they are written.

A loop over the rows of a batch is analyzed as a function of all rows at once.
An optimizer's update is traced once for all traces of a step, so it does not
depend on the number of rows. Its results mix rows only if they depend on a
gradient that does.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from keras_strategies._types import Array, Equation
from keras_strategies.passes import stages
from keras_strategies.passes.marked_updates import is_same_update
from keras_strategies.passes.row_kinds.kinds import PLAIN, Kind, is_constant


def map_over_rows(
    equations: Sequence[Any],
    kinds: Sequence[Kind],
    can_map: Callable[[Equation], bool],
) -> list[ClosedJaxpr] | None:
    """Returns functions without a loop that compute the same as loops do.

    A loop over rows (`jax.lax.map`, `jax.lax.scan`) whose carry stays the same
    computes each row by itself, as `jax.vmap` does. A part of the carry to
    which each row only adds a term becomes a sum over the rows. Any other carry
    depends on the rows before a row, or on the row's position.

    Args:
      equations: The loop in each of the traces.
      kinds: The kinds of its operands.
      can_map: A function that returns whether `jax.vmap` of an equation
        computes the same for each row.

    Returns:
      For each trace, a function of the loop's operands. None if the loop is not
      shown to be one over separate rows.
    """
    _, _, scanned = stages.scan_operands(equations[0], kinds)
    is_over_rows = any(kind.is_rows and kind.axis == 0 for kind in scanned)
    # Constants are scanned in the gradient of a loss that is linear in rows.
    lengths = {equation.params["length"] for equation in equations}
    if not is_over_rows and len(lengths) == 1:
        return None
    terms = list(map(_find_terms, equations))
    bodies = [equation.params["jaxpr"] for equation in equations]
    if None in terms or not all(
        can_map(inner)
        for body in bodies
        for inner in stages.all_equations(body)
    ):
        return None
    return [
        _map(equation, added or [])
        for equation, added in zip(equations, terms, strict=True)
    ]


def _find_terms(equation: Equation) -> list[list[Any]] | None:
    """Returns what each turn adds to each part of the carry, or None."""
    body: Jaxpr = equation.params["jaxpr"].jaxpr
    _, carry, _ = stages.scan_operands(equation, body.invars)
    terms = []
    for before, after in zip(carry, body.outvars, strict=False):
        added = [] if before is after else _find_sum(body, before, after)
        if added is None:
            return None
        terms.append(added)
    return terms


def _find_sum(body: Jaxpr, before: Any, after: Any) -> list[Any] | None:
    """Returns the terms of the sum `after`, which starts with `before`.

    Returns None if anything else reads one of its partial sums.
    """
    added, part = [], before
    while part is not after:
        readers = [e for e in body.eqns if any(v is part for v in e.invars)]
        is_read_once = len(readers) == 1 and part not in body.outvars
        if not is_read_once or readers[0].primitive.name not in _SUMS:
            return None
        one, two = readers[0].invars
        if one is two:
            return None
        added.append(two if one is part else one)
        part = readers[0].outvars[0]
    is_read = any(v is after for e in body.eqns for v in e.invars)
    is_result = [v for v in body.outvars if v is after]
    return None if is_read or len(is_result) > 1 else added


_SUMS = ("add", "add_any")


def _map(equation: Equation, terms: list[list[Any]]) -> ClosedJaxpr:
    """Returns a loop as a function of all rows (see `map_over_rows`)."""
    closed = equation.params["jaxpr"]
    body: Jaxpr = closed.jaxpr
    outputs = [*itertools.chain(*terms), *body.outvars[len(terms) :]]
    needed = stages.needed_equations(body.eqns, outputs, lambda _: False)
    turn = jaxpr_as_fun(
        closed.replace(jaxpr=body.replace(eqns=needed, outvars=outputs))
    )

    def compute(*operands: Array) -> list[Any]:
        consts, carry, scanned = stages.scan_operands(equation, operands)
        of_row = functools.partial(turn, *consts, *carry)
        length = equation.params["length"]
        results = jax.vmap(of_row, axis_size=length)(*scanned)
        for k, added in enumerate(terms):
            for _ in added:
                carry[k] += jnp.sum(results.pop(0), axis=0)
        return [*carry, *results]

    shapes = [stages.shape_of(operand.aval) for operand in equation.invars]
    return jax.make_jaxpr(compute)(*shapes)


def kinds_of_update(
    equations: Sequence[Any], kinds: Sequence[Kind]
) -> list[Kind] | None:
    """Returns the `Kind` of each result of an update that both traces share.

    Args:
      equations: The same equation in one or two traces.
      kinds: The kinds of its operands.

    Returns:
      None if the equations are not such an update, or if an operand neither
      mixes rows nor is a constant.
    """
    are_known = all(
        k.is_mixed or (k.is_const and is_constant(k)) for k in kinds
    )
    if not are_known or not is_same_update(equations):
        return None
    jaxpr = equations[0].params["jaxpr"].jaxpr
    pairs = zip(jaxpr.invars, kinds, strict=True)
    mixed = {v: kind for v, kind in pairs if kind.is_mixed}
    for equation in jaxpr.eqns:
        wrong = [
            mixed[v] for v in stages.variables(equation.invars) if v in mixed
        ]
        if wrong:
            mixed |= dict.fromkeys(equation.outvars, wrong[0])
    exact = PLAIN.but(is_global=True)
    return [
        mixed.get(v, exact) if stages.variables([v]) else exact
        for v in jaxpr.outvars
    ]
