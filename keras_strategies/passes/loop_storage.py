"""Changes what the loops of a forward and a backward pass store.

- In the backward pass of a loop, JAX adds each iteration's gradient of a weight
  to a carry. So each iteration reads and writes an array of the weight's size,
  for a product of few rows. The sum of the iterations' products is one product
  of their operands, stacked: an iteration writes these instead, if they are
  smaller.
- The forward loop stores values that follow from others that it stores, such as
  the derivative of a sigmoid. The backward loop computes these again.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from keras_strategies._types import Array
from keras_strategies.passes.stages import (
    compute_equations,
    equations_in,
    get_shape,
    has_effects,
    is_collective,
    names_in,
    needed_equations,
    read_value,
    references,
    rewrite_programs,
    scan_operands,
    variables,
)
from keras_strategies.passes.weight_gradients import count_uses

_MOVES = names_in("convert_element_type copy reshape squeeze transpose")
"""Primitives that may follow a product before it is added to a carry."""
_CHEAP = names_in("add convert_element_type integer_pow mul neg sub")
_MAX_CHEAP = 6
"""The number of equations by which the backward loop computes a value again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sum:
    """A carry to which each iteration adds a product, or a sum over rows.

    All are floats: the sum of numbers that were cut to integers is another one.

    Attributes:
      place: The carry's position.
      dtype: The dtype in which the iterations are summed: the carry's, or that
        of the product if it is wider.
      source: The equation of the product, or of the sum.
      moves: The equations that change it, before it is added.
    """

    place: int
    dtype: Any
    source: Any
    moves: Sequence[Any]

    def compute(self, jaxpr: Jaxpr, operands: Sequence[Any]) -> Array:
        """Returns the sum over all iterations.

        Args:
          jaxpr: The body of the loop.
          operands: The stacked operands of `source`.
        """
        params = self.source.params
        if self.source.primitive.name == "reduce_sum":
            axes = (0, *(axis + 1 for axis in params["axes"]))
            total = jnp.sum(operands[0], axes, dtype=self.dtype)
        else:
            sides: Any = params["dimension_numbers"]
            contracted, batch = (
                tuple(tuple(d + 1 for d in dims) for dims in side)
                for side in sides
            )
            contracted = tuple((0, *dims) for dims in contracted)
            numbers: Any = (contracted, batch)
            one, two = operands
            if self.dtype != self.source.outvars[0].aval.dtype:
                # XLA for CPUs has no product of bfloat16 that is float32.
                one, two = one.astype(self.dtype), two.astype(self.dtype)
            total = lax.dot_general(
                *(one, two),
                numbers,
                precision=params["precision"],
                preferred_element_type=self.dtype,
            )
        if not self.moves:
            return total
        last = self.moves[-1].outvars[0]
        return compute_equations(jaxpr, self.moves, [last], lambda v: total)[0]


@dataclasses.dataclass(kw_only=True)
class _Changes:
    """The changes of a loop.

    Attributes:
      sums: The carries that are summed after it.
      again: For each slice that it computes from others instead of reading it,
        its variable in the other loop, the equations there, and the slices that
        they read, by their variables there.
      dropped: The positions of results that are not stacked.
    """

    sums: Sequence[_Sum] = ()
    again: dict[Var, tuple[Var, list[Any], dict[Var, Var]]] = dataclasses.field(
        default_factory=dict
    )
    dropped: set[int] = dataclasses.field(default_factory=set)

    @property
    def has_any(self) -> bool:
        """Whether there is any change."""
        return bool(self.sums or self.again or self.dropped)


def rewrite_loops(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Changes what a program's loops store, and returns the new program.

    It computes the same values, apart from rounding.
    """
    return rewrite_programs(traced, _rewrite_program)


def _rewrite_program(program: Jaxpr) -> list[Any]:
    loops = {
        id(e): _Changes()
        for e in program.eqns
        if e.primitive.name == "scan" and _is_simple(e)
    }
    uses = count_uses(program.eqns, variables(program.outvars))
    makers = {v: e for e in program.eqns if id(e) in loops for v in e.outvars}
    for equation in program.eqns:
        if (changes := loops.get(id(equation))) is None:
            continue
        sources = map(makers.get, variables(equation.invars))
        for source in {id(e): e for e in sources if e is not None}.values():
            dropped = loops[id(source)].dropped
            _find_again(source, equation, uses, changes, dropped)
        changes.sums = _find_sums(equation, changes.again)
    parts = (_rewrite(e, loops.get(id(e))) for e in program.eqns)
    return list(itertools.chain.from_iterable(parts))


def _rewrite(equation: Any, changes: _Changes | None) -> list[Any]:
    """Returns the equations of a changed loop."""
    if changes is None or not changes.has_any:
        return [equation]
    inside = equation.params["jaxpr"].jaxpr.invars
    read = [k for k, v in enumerate(inside) if v not in changes.again]

    def compute(*arrays: Array) -> list[Any]:
        operands = dict(zip(read, arrays, strict=True))
        operands = list(map(operands.get, range(len(inside))))
        return _compute_loop(equation, changes, operands)

    invars = [equation.invars[k] for k in read]
    traced = jax.make_jaxpr(compute)(*(get_shape(v.aval) for v in invars))
    outvars = enumerate(equation.outvars)
    outvars = [v for k, v in outvars if k not in changes.dropped]
    names = dict(zip(traced.jaxpr.outvars, outvars, strict=True))
    names |= zip(traced.jaxpr.invars, invars, strict=True)
    return [
        new.replace(
            invars=[
                v if isinstance(v, Literal) else names.get(v, v)
                for v in new.invars
            ],
            outvars=[names.get(v, v) for v in new.outvars],
        )
        for new in traced.jaxpr.eqns
    ]


def _find_again(
    first: Any,
    second: Any,
    uses: Mapping[Var, int],
    changes: _Changes,
    dropped: set[int],
) -> None:
    """Finds the results of a loop that another one can compute from others.

    Args:
      first: The loop that computes them.
      second: The loop that reads them, each of its iterations.
      uses: How often variables are read.
      changes: The changes of the second loop, to which they are added.
      dropped: The positions of results of the first one, to which theirs are.
    """
    jaxpr, inner = (e.params["jaxpr"].jaxpr for e in (first, second))
    outer = scan_operands(second, second.invars)[2]
    inside = scan_operands(second, inner.invars)[2]
    slices = {
        o: v for o, v in zip(outer, inside, strict=True) if isinstance(o, Var)
    }
    carry, scanned = scan_operands(first, first.invars)[1:]
    pairs = [
        *zip(first.outvars, jaxpr.outvars, strict=True),
        *zip(scanned, scan_operands(first, jaxpr.invars)[2], strict=True),
    ]
    known = {
        variable: slices[array]
        for array, variable in pairs[len(carry) :]
        if isinstance(array, Var) and array in slices
        if isinstance(variable, Var)
    }
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    for place, (result, variable) in enumerate(pairs[: len(first.outvars)]):
        is_read = result in slices and isinstance(variable, Var)
        if place < len(carry) or not is_read or uses[result] > 1:
            continue
        if known.get(variable) is not slices[result]:
            continue  # It is stored twice.
        others = {v: of for v, of in known.items() if v is not variable}
        equations: dict[int, Any] = {}
        if _is_cheap(variable, others, makers, equations):
            ordered = [e for e in jaxpr.eqns if id(e) in equations]
            changes.again[slices[result]] = variable, ordered, others
            dropped.add(place)
            known = others


def _is_cheap(
    variable: Any,
    known: Mapping[Var, Var],
    makers: Mapping[Var, Any],
    equations: dict[int, Any],
) -> bool:
    """Returns whether a value follows from others, and adds the equations."""
    if isinstance(variable, Literal) or variable in known:
        return True
    equation = makers.get(variable)
    if equation is None or equation.primitive.name not in _CHEAP:
        return False
    equations[id(equation)] = equation
    return len(equations) <= _MAX_CHEAP and all(
        _is_cheap(v, known, makers, equations) for v in equation.invars
    )


def _is_simple(equation: Any) -> bool:
    """Returns whether only arrays go into a loop's body, and out of it."""
    body = equation.params["jaxpr"]
    return (
        not body.consts
        and not references(equation)
        and not any(
            has_effects(each) or is_collective(each) or references(each)
            for each in (equation, *equations_in(equation))
        )
    )


def _find_sums(equation: Any, again: Mapping[Var, Any]) -> list[_Sum]:
    """Finds the carries of a loop that can be summed after it."""
    jaxpr = equation.params["jaxpr"].jaxpr
    consts, carry, scanned = scan_operands(equation, jaxpr.invars)
    counts = count_uses(jaxpr.eqns, variables(jaxpr.outvars))
    makers = {
        e.outvars[0]: e
        for e in jaxpr.eqns
        if len(e.outvars) == 1 and counts.get(e.outvars[0]) == 1
    }
    stacked, found = set[Var](scanned) - again.keys(), list[_Sum]()
    fixed = set(consts)
    # The largest first: what these stack, smaller ones read, too.
    places = sorted(range(len(carry)), key=lambda k: -_count_bytes(carry[k]))
    for place in places:
        before = carry[place]
        one = _find_sum(place, before, jaxpr.outvars[place], counts, makers)
        if one is None:
            continue
        operands = set(variables(one.source.invars))
        is_varying = len(one.source.invars) == len(variables(one.source.invars))
        if not is_varying or operands & fixed:
            continue
        new = operands - stacked
        if sum(map(_count_bytes, new)) < _count_bytes(before):
            stacked |= new
            found.append(one)
    return found


def _find_sum(
    place: int,
    before: Any,
    after: Any,
    counts: Mapping[Var, int],
    makers: dict[Var, Any],
) -> _Sum | None:
    """Finds what an iteration adds to a carry that nothing else reads."""
    addition = None if isinstance(after, Literal) else makers.get(after)
    if addition is None or counts.get(before) != 1:
        return None
    terms = [v for v in addition.invars if v is not before]
    is_sum = addition.primitive.name in ("add", "add_any") and len(terms) == 1
    term: Any = terms[0] if is_sum else None
    moves: list[Any] = []
    found: _Sum | None = None
    while (source := _find_maker(term, makers)) is not None:
        name = source.primitive.name
        dtypes = [v.aval.dtype for v in (before, term, source.invars[0])]
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            break
        if name in ("dot_general", "reduce_sum"):
            dtype = jnp.promote_types(before.aval.dtype, term.aval.dtype)
            found = _Sum(
                place=place, dtype=dtype, source=source, moves=moves[::-1]
            )
            if name == "dot_general":
                break
        elif source.primitive.name not in _MOVES:
            break
        # Sums of sums are sums, too.
        moves.append(source)
        term = source.invars[0]
    return found


def _find_maker(value: Any, makers: dict[Var, Any]) -> Any:
    return makers.get(value) if isinstance(value, Var) else None


def _count_bytes(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize


def _compute_loop(
    equation: Any, changes: _Changes, operands: Sequence[Array]
) -> list[Any]:
    """Computes a changed loop, and then the sums that its body leaves out."""
    params, again, sums = equation.params, changes.again, changes.sums
    jaxpr = params["jaxpr"].jaxpr
    names = scan_operands(equation, jaxpr.invars)
    consts, carry, scanned = scan_operands(equation, operands)
    count, left_out = len(carry), {each.place for each in sums}
    kept = [k for k in range(count) if k not in left_out]
    pairs = zip(names[2], scanned, strict=True)
    rows = {v: array for v, array in pairs if v not in again}
    read = dict.fromkeys(v for each in sums for v in each.source.invars)
    new = [v for v in read if v not in rows]
    fixed = dict(zip(names[0], consts, strict=True))
    places = range(count, len(jaxpr.outvars))
    stacks = [k for k in places if k not in changes.dropped]
    results = [*(jaxpr.outvars[k] for k in (*kept, *stacks)), *new]

    def iterate(carry: list[Any], slices: list[Any]) -> tuple[Any, Any]:
        values = fixed | dict(zip(rows, slices, strict=True))
        values |= zip((names[1][k] for k in kept), carry, strict=True)
        # A value that follows from others was found after them.
        for variable, (result, equations, of) in reversed(again.items()):
            (values[variable],) = compute_equations(
                jaxpr, equations, [result], lambda v, of=of: values[of[v]]
            )
        outputs = [
            v for v in dict.fromkeys(variables(results)) if v not in values
        ]
        equations = needed_equations(jaxpr.eqns, outputs, has_effects)
        found = compute_equations(jaxpr, equations, outputs, values.__getitem__)
        values |= zip(outputs, found, strict=True)
        after = [read_value(v, values) for v in results]
        return after[: len(kept)], after[len(kept) :]

    last, stacked = lax.scan(
        iterate,
        [carry[k] for k in kept],
        list(rows.values()),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    rows |= zip(new, stacked[len(stacks) :], strict=True)
    final = dict(zip(kept, last, strict=True))
    for each in sums:
        total = each.compute(jaxpr, [rows[v] for v in each.source.invars])
        final[each.place] = carry[each.place] + total
    return [*(final[k] for k in range(count)), *stacked[: len(stacks)]]
