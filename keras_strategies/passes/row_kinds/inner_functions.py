"""Functions in a trace that are not analyzed as they are written.

A loop over the rows of a batch is analyzed as a function of all rows at once.
An optimizer's update is traced once for all traces of a step, so it does not
depend on the number of rows. Its results mix rows only if they depend on a
gradient that does.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from keras_strategies._types import Array, Equation
from keras_strategies.passes import stages
from keras_strategies.passes.marked_updates import is_same_update
from keras_strategies.passes.row_kinds.kinds import PLAIN, Kind, is_constant
from keras_strategies.passes.row_kinds.rules import has_rule


def map_over_rows(
    equations: Sequence[Any], kinds: Sequence[Kind]
) -> list[ClosedJaxpr] | None:
    """Returns functions without a loop that compute the same as loops do.

    A loop over rows (`jax.lax.map`, `jax.lax.scan`) whose carry stays the same
    computes each row by itself, as `jax.vmap` does. A part of the carry to
    which each row only adds a term becomes a sum over the rows. Any other carry
    depends on the rows before a row, or on the row's position.

    Args:
      equations: The loop in each of the traces.
      kinds: The kinds of its operands.

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
        has_rule(inner)
        for body in bodies
        for inner in stages.all_equations(body)
    ):
        return None
    return [
        _map(equation, added or [])
        for equation, added in zip(equations, terms, strict=True)
    ]


def _find_terms(equation: Equation) -> list[list[Any]] | None:
    """Returns what each iteration adds to each part of the carry, or None."""
    body: Jaxpr = equation.params["jaxpr"].jaxpr
    _, carry, _ = stages.scan_operands(equation, body.invars)
    return find_terms(body, carry)


def find_terms(
    jaxpr: Jaxpr, states: Sequence[Any], subtractions: Sequence[str] = ()
) -> list[list[Any]] | None:
    """Finds the values that a function adds to its states.

    Args:
      jaxpr: The function. Its first outputs are the new states.
      states: The inputs that are the states.
      subtractions: The primitives that count as additions, too.

    Returns:
      For each state, the terms of which the new state is the sum, besides the
      state itself. None if a new state is computed in another way, or if a term
      or another output depends on a state.
    """
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}

    def find(state: Any, value: Any) -> list[Any] | None:
        if value is state:
            return []
        equation = None if isinstance(value, Literal) else makers.get(value)
        if equation is None:
            return None
        operands, name = equation.invars, equation.primitive.name
        if _keeps_entries(equation):
            return find(state, operands[0])
        is_sum = name in ("add", "add_any")
        if not is_sum and name not in subtractions:
            return None
        for old, new in (operands, operands[::-1])[: 1 + is_sum]:
            terms = find(state, old)
            if terms is not None:
                return [*terms, new]
        return None

    count = len(states)
    found = list(map(find, states, jaxpr.outvars))
    terms = [terms for terms in found if terms is not None]
    if len(terms) < count:
        return None
    outputs = [*itertools.chain(*terms), *jaxpr.outvars[count:]]
    needed = stages.needed_equations(jaxpr.eqns, outputs)
    read = [*outputs, *(v for e in needed for v in e.invars)]
    return terms if {*states}.isdisjoint(stages.variables(read)) else None


def _keeps_entries(equation: Equation) -> bool:
    """Returns whether a result has the entries of the equation's operand."""
    if equation.primitive.name != "convert_element_type":
        return equation.primitive.name == "copy"
    # Sums that are cut to integers do not add up.
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    are_integers = all(jnp.issubdtype(d, jnp.integer) for d in (old, new))
    return are_integers or jnp.issubdtype(new, jnp.floating)


def _map(equation: Equation, terms: list[list[Any]]) -> ClosedJaxpr:
    """Returns a loop as a function of all rows (see `map_over_rows`)."""
    closed = equation.params["jaxpr"]
    body: Jaxpr = closed.jaxpr
    outputs = [*itertools.chain(*terms), *body.outvars[len(terms) :]]
    needed = stages.needed_equations(body.eqns, outputs)
    iterate = jaxpr_as_fun(
        closed.replace(jaxpr=body.replace(eqns=needed, outvars=outputs))
    )

    def compute(*operands: Array) -> list[Any]:
        consts, carry, scanned = stages.scan_operands(equation, operands)
        iterate_row = functools.partial(iterate, *consts, *carry)
        length = equation.params["length"]
        results = jax.vmap(iterate_row, axis_size=length)(*scanned)
        for k, added in enumerate(terms):
            for _ in added:
                carry[k] += jnp.sum(results.pop(0), axis=0)
        return [*carry, *results]

    shapes = [stages.get_shape(operand.aval) for operand in equation.invars]
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
