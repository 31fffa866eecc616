"""The equations that can compute with shards of their operands.

These are calls, loops (`jax.lax.scan`) over the first dimension of values,
casts, names, stacks, lookups and sums. The other equations gather shards just
before they are computed.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from keras_strategies._types import Array
from keras_strategies.passes.lookups import find_columns, is_float, sums_rows
from keras_strategies.passes.specs import (
    Sharded,
    find_split,
    joins,
    splits,
    stacked_spec,
    stacks,
    unstacks,
)
from keras_strategies.passes.stages import (
    is_reference,
    references,
    scan_operands,
    variables,
    with_consts_as_inputs,
)
from keras_strategies.passes.weight_gradients import adds_rows, casts

Gathered = tuple[Var, ...]
"""A variable, followed by the variables that it was cast from."""

_MANY = 4
"""A table is cast before a lookup if the replicas look up more rows than one in
this many."""

_REMATERIALIZED = ("remat2", "remat", "checkpoint")
PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that only call a jaxpr."""


def is_loop(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a loop that can slice shards."""
    return equation.primitive.name == "scan" and not references(equation)


def reads_slices(equation: JaxprEqn, position: int, spec: Sharded) -> bool:
    """Returns whether each iteration of a loop reads a slice of an operand.

    Args:
      equation: The loop.
      position: The operand's position.
      spec: The operand's spec. A shard has no slices if the operand is sharded
        along its first dimension.
    """
    consts, carry, _ = scan_operands(equation, equation.invars)
    return spec.dim > 0 and position >= len(consts) + len(carry)


def returns_slices(equation: JaxprEqn, position: int, spec: Sharded) -> bool:
    """Returns whether each iteration of a loop computes a slice of a result.

    Args:
      equation: The loop.
      position: The result's position.
      spec: The spec with which the result's sum is scattered.
    """
    _, carry, _ = scan_operands(equation, equation.invars)
    return spec.dim > 0 and position >= len(carry)


def compute_call(
    equation: JaxprEqn,
    operands: Sequence[Array],
    inner: Callable[..., list[Any]],
) -> list[Any]:
    """Computes a call or a loop with another function.

    Args:
      equation: The call, or the loop.
      operands: Its operands.
      inner: A function of the operands; of a loop, those of an iteration: the
        constants, the carry and the slices. It returns the new carry and slices
        of the other results.

    Returns:
      The results of the equation.
    """
    if is_loop(equation):
        consts, carry, scanned = scan_operands(equation, operands)

        def iterate(carry: list[Any], slices: list[Any]) -> tuple[Any, Any]:
            results = inner(*consts, *carry, *slices)
            return results[: len(carry)], results[len(carry) :]

        return scan_as(equation, iterate, carry, scanned)
    if not is_rematerialized(equation):
        return inner(*operands)
    traced = jax.make_jaxpr(inner)(*operands)
    params = equation.params | {"jaxpr": with_consts_as_inputs(traced)}
    return equation.primitive.bind(*traced.consts, *operands, **params)


def scan_as(
    equation: JaxprEqn,
    body: Callable[..., tuple[Any, Any]],
    carry: list[Any],
    slices: list[Any],
) -> list[Any]:
    """Calls `jax.lax.scan` with the options of an equation of it."""
    names = ("length", "reverse", "unroll")
    options = {name: equation.params[name] for name in names}
    last, stacked = jax.lax.scan(body, carry, slices, **options)
    return [*last, *stacked]


def is_rematerialized(equation: JaxprEqn) -> bool:
    """Returns whether an equation is computed again for gradients."""
    return equation.primitive.name in _REMATERIALIZED


def is_plain(variable: Var) -> bool:
    """Returns whether a value is neither a random key nor a reference."""
    array: Any = variable.aval
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return not is_key and not is_reference(variable)


def gathers_again(equation: JaxprEqn) -> bool:
    """Returns whether an equation's body gathers what it reads by itself."""
    return is_rematerialized(equation) or is_loop(equation)


def is_call(equation: JaxprEqn) -> bool:
    """Returns whether an equation calls a function that can take shards."""
    return equation.primitive.name in (*_REMATERIALIZED, *PLAIN_CALLS)


def names(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a `checkpoint_name`, the identity."""
    return equation.primitive.name == "name"


def adds(equation: JaxprEqn) -> bool:
    """Returns whether an equation adds gradients."""
    return equation.primitive.name == "add_any"


def keeps_shards(equation: JaxprEqn) -> bool:
    """Returns whether an equation's result can be computed from shards."""
    return any(keeps(equation) for keeps in (casts, names, stacks, splits))


def sums_shards(equation: JaxprEqn) -> bool:
    """Returns whether a result's sum can be computed from operands' sums."""
    kinds = (adds, names, adds_rows, unstacks, joins)
    return any(is_kind(equation) for is_kind in kinds)


def find_lookups(
    equations: Sequence[Any], specs: dict[Var, Sharded]
) -> dict[Var, tuple[Var, int]]:
    """Finds the lookups that are computed in the columns of sharded values.

    Args:
      equations: The equations, in their order.
      specs: The specs of sharded values.

    Returns:
      A dict from the result of each lookup to the variable in whose columns it
      is computed, and to the dimension of the result that contains the columns.
      The variable is the table before it is cast, if the replicas look up few
      of its rows.
    """
    tables = {v: (v, spec) for v, spec in specs.items()}
    found: dict[Var, tuple[Var, int]] = {}
    for equation in equations:
        read = variables(equation.invars[:1])
        if not read or read[0] not in tables:
            continue
        table: Any
        result: Any = equation.outvars[0]
        table, spec = tables[read[0]]
        if casts(equation) or names(equation):
            is_same = is_float(table) and is_float(result)
            tables[result] = (table if is_same else result), spec
        dim = find_columns(equation, spec)
        if dim is not None and not adds_rows(equation):
            size = result.aval.size * spec.count * _MANY
            is_few = size < table.aval.size
            found[result] = (table if is_few else read[0]), dim
    return found


def find_gathers(
    equations: Sequence[Any], sharded: set[Var], lookups: Set[Var]
) -> dict[int, list[Gathered]]:
    """Finds the values that each equation must gather before it is computed.

    A gather needs only a shard, so nothing stops a compiler from gathering all
    values at the start or before a loop, which needs memory for all of them at
    the same time. Therefore each gather is made to depend on the computation
    just before the equation that reads the value.

    Values that several equations read, for example in the forward and the
    backward pass, are left out, because they stay gathered between the reads.

    Args:
      equations: The equations, in their order.
      sharded: The variables of which only this replica's shard is available.
      lookups: Results of equations that do not gather their first operand.

    Returns:
      A dict from the position of an equation to the values that it gathers.
    """
    origins: dict[Var, Gathered] = {v: (v,) for v in sharded}
    reads: dict[int, list[Var]] = {}
    holders: Counter[Var] = Counter()
    for place, equation in enumerate(equations):
        operands = variables(equation.invars)
        # Casts are applied to shards, before they are gathered.
        if keeps_shards(equation) and operands and operands[0] in origins:
            cast = equation.outvars[0]
            origins[cast] = cast, *origins[operands[0]]
            continue
        if not lookups.isdisjoint(equation.outvars):
            operands = operands[1:]
        reads[place] = [v for v in dict.fromkeys(operands) if v in origins]
        if not gathers_again(equation):
            holders.update(reads[place])
    gathers: dict[int, list[Gathered]] = {}
    for place, read in reads.items():
        is_again = gathers_again(equations[place])
        gathered = [origins[v] for v in read if is_again or holders[v] == 1]
        if gathered:
            gathers[place] = gathered
    return gathers


def find_scattered(
    equations: Sequence[Any], scattered: dict[Var, Sharded], uses: Counter[Var]
) -> dict[Var, Sharded]:
    """Finds the variables whose sums are scattered where they are computed.

    These are results of called functions, gradients of lookups, and sums or
    names of such results. An example is the gradient of a weight that several
    rematerialized functions read.
    """
    makers = {v: e for e in equations for v in e.outvars}
    places: dict[Var, Sharded] = {}
    # A name's operand is scattered if the name is.
    read = dict(scattered)
    for equation in reversed(equations):
        if names(equation) and equation.outvars[0] in read:
            spec = read[equation.outvars[0]]
            read |= dict.fromkeys(variables(equation.invars), spec)

    def sink(variable: Var | Literal, spec: Sharded) -> bool:
        is_literal = isinstance(variable, Literal)
        if is_literal or uses[variable] != 1 or variable not in makers:
            return False
        maker = makers[variable]
        is_inner = is_call(maker)
        if is_loop(maker):
            position = maker.outvars.index(variable)
            is_inner = returns_slices(maker, position, spec)
        if adds_rows(maker):
            is_inner = sums_rows(maker, makers, spec)
        if unstacks(maker):
            is_inner = _sinks_all(maker, read, uses)
        if joins(maker):
            is_inner = find_split(maker, spec) is not None
        if is_inner and (unstacks(maker) or joins(maker)):
            is_inner = sink(maker.invars[0], stacked_spec(spec))
        if adds(maker) or names(maker):
            # A list, not a generator, because `any` must not skip the second
            # operand.
            is_inner = any([sink(v, spec) for v in maker.invars])
        if is_inner:
            places[variable] = spec
        return is_inner

    for variable, spec in scattered.items():
        sink(variable, spec)
    return places


def _sinks_all(
    equation: JaxprEqn, scattered: dict[Var, Sharded], uses: Counter[Var]
) -> bool:
    """Returns whether all results are scattered equally, and read only so."""
    specs = {scattered.get(v) for v in equation.outvars}
    is_only = all(uses[v] == 1 for v in equation.outvars)
    return len(specs) == 1 and None not in specs and is_only
