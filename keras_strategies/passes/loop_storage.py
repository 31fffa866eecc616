"""Changes what loops compute and store, such as those of recurrent layers.

- A product of a slice and a weight that needs no earlier iteration is computed
  for all iterations before the loop, if the results are smaller than the
  weight. Results that are such products are computed after the loop.
- In the backward pass of a loop, JAX adds each iteration's gradient of a weight
  to a carry, which it reads and writes for a product of few rows. The sum of
  these products is one product of their operands, stacked: an iteration writes
  these instead, if they are smaller.
- The forward loop stores values that follow from others that it stores, such as
  the derivative of a sigmoid. The backward loop computes these again.

What is stacked for this is at most as large as what the loop stacks without it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from keras_strategies._types import Array
from keras_strategies.passes.collective_cut import inline_program
from keras_strategies.passes.sharded_calls import scan_as
from keras_strategies.passes.specs import splits
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
from keras_strategies.passes.weight_gradients import (
    count_uses,
    find_makers,
    replace_equations,
)

_PRODUCT = "dot_general"
_MOVES = names_in("convert_element_type copy reshape squeeze transpose")
"""Primitives that may follow a product before it is added to a carry."""
_CHEAP = names_in("add convert_element_type integer_pow mul neg sub")
_BY_ITERATION = (*_CHEAP, *_MOVES, _PRODUCT)
"""Primitives that `jax.vmap` computes for all iterations at once."""
_Values = Mapping[Var, Any]
_MAX_CHEAP = 6
"""The number of equations by which the backward loop computes a value again."""


@dataclasses.dataclass(frozen=True)
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
            numbers: Any = params["dimension_numbers"]
            (one, two), batch = jax.tree.map(lambda dim: dim + 1, numbers)
            numbers = ((0, *one), (0, *two)), batch
            if self.dtype != self.source.outvars[0].aval.dtype:
                # XLA for CPUs has no product of bfloat16 that is float32.
                operands = [x.astype(self.dtype) for x in operands]
            total = lax.dot_general(
                *(operands[0], operands[1]),
                numbers,
                precision=params["precision"],
                preferred_element_type=self.dtype,
            )
        if not self.moves:
            return total
        last = self.moves[-1].outvars
        return compute_equations(jaxpr, self.moves, last, lambda v: total)[0]


class _Loop:
    """A loop, and how it changes.

    Attributes:
      equation: The equation of the loop.
      slices: The values that an iteration reads from arrays, and these.
      results: The values that are stacked, and the arrays of these.
      before: The products that are computed before it.
      after: The equations of results that are computed after it, by position.
      sums: The carries that are summed after it.
      again: For each slice that it computes instead of reading it, its variable
        and equations in the other loop, and the slices that these read.
      dropped: The positions of results that are not stacked.
    """

    def __init__(self, equation: Any) -> None:
        self.equation = equation
        self.jaxpr: Jaxpr = equation.params["jaxpr"].jaxpr
        inputs = scan_operands(equation, self.jaxpr.invars)
        self.consts, self.carry, self.scanned = inputs
        outer = scan_operands(equation, equation.invars)[2]
        results = zip(self.jaxpr.outvars, equation.outvars, strict=True)
        # Values of an iteration, and the arrays of those of all.
        self.slices = list(zip(self.scanned, outer, strict=True))
        self.results = list(results)[len(self.carry) :]
        self.before = list[Var]()
        self.after = dict[int, Any]()
        self.sums = list[_Sum]()
        self.again = dict[Var, tuple[Var, list[Any], dict[Var, Var]]]()
        self.dropped = set[int]()

    def find_moved(self) -> None:
        """Finds what is computed before and after the loop."""
        outvars, count = self.jaxpr.outvars, len(self.carry)
        uses = count_uses(self.jaxpr.eqns, variables(outvars))
        makers = find_makers(self.jaxpr.eqns, variables(outvars))
        fixed, stacked = set(self.consts), set(self.scanned) - self.again.keys()
        # The bytes that an iteration may store, or read, in addition.
        left = _count_bytes(*self.scanned, *variables(outvars[count:]))
        free = set[Var](stacked)
        for each in self.jaxpr.eqns:
            read = set(variables(each.invars))
            is_free = bool(read & free) and read <= free | fixed
            if not is_free or each.primitive.name not in _BY_ITERATION:
                continue
            free.update(each.outvars)
            size = _count_bytes(*each.outvars)
            is_less = size < _count_bytes(*read & fixed) and size <= left
            if each.primitive.name == _PRODUCT and is_less:
                self.before += each.outvars
                left -= size
        # The largest first: what these stack, smaller ones read, too.
        places = range(count)
        for place in sorted(places, key=lambda k: -_count_bytes(self.carry[k])):
            before = self.carry[place]
            one = _find_sum(place, before, outvars[place], makers)
            if one is None or uses[before] > 1:
                continue
            operands = one.source.invars
            size = _count_bytes(*set(operands) - stacked)
            is_less = size < _count_bytes(before) and size <= left
            if is_less and fixed.isdisjoint(operands):
                stacked.update(operands)
                left -= size
                self.sums.append(one)
        for place in range(count, len(outvars)):
            product = _find_maker(outvars[place], makers)
            if product is None or product.primitive.name != _PRODUCT:
                continue
            read = set(variables(product.invars))
            size = _count_bytes(*read - fixed - stacked)
            if read & fixed and size < _count_bytes(outvars[place]):
                self.after[place] = product

    def rewrite(self) -> list[Any]:
        """Returns the equations of the changed loop."""
        equation = self.equation
        changes = self.before, self.after, self.sums, self.again, self.dropped
        if not any(changes):
            return [equation]
        shapes = (get_shape(v.aval) for v in equation.invars)
        # It has the names of the loop's layer, for programs' texts.
        named = jax.named_scope(str(equation.source_info.name_stack))
        traced = jax.make_jaxpr(named(self._compute_separately))(*shapes)
        outvars = enumerate(equation.outvars)
        outvars = [v for k, v in outvars if k not in self.dropped]
        return inline_program(traced.jaxpr, equation.invars, outvars)

    def _compute_separately(self, *operands: Array) -> list[Any]:
        """Computes the loop; no two results are one array, or an operand."""
        seen, results = set(map(id, operands)), []
        for result in self._compute(*operands):
            # `jax.lax.scan` returns a slice that a body returns as it is.
            results.append(jnp.copy(result) if id(result) in seen else result)
            seen.add(id(result))
        return results

    def _compute(self, *operands: Array) -> list[Any]:
        """Computes the loop, and what its body leaves out."""
        jaxpr, count = self.jaxpr, len(self.carry)
        consts, carry, scanned = scan_operands(self.equation, operands)
        fixed = dict(zip(self.consts, consts, strict=True))
        pairs = zip(self.scanned, scanned, strict=True)
        rows = {v: array for v, array in pairs if v not in self.again}
        rows |= self._compute_all(self.before, fixed, rows)
        after = {k: e for k, e in self.after.items() if k not in self.dropped}
        left_out = {*self.dropped, *after, *(each.place for each in self.sums)}
        kept = [k for k in range(len(jaxpr.outvars)) if k not in left_out]
        split = sum(k < count for k in kept)
        sources = *(each.source for each in self.sums), *after.values()
        read = dict.fromkeys(v for e in sources for v in variables(e.invars))
        new = [v for v in read if v not in fixed | rows]
        results = [*(jaxpr.outvars[k] for k in kept), *new]
        names = list(rows)
        # Otherwise, each iteration of XLA for TPUs (libtpu 0.0.42) changes the
        # layout of a bias of shape (1, units).
        flat = [jnp.squeeze(array) for array in consts]

        def iterate(carry: list[Any], slices: list[Any]) -> tuple[Any, Any]:
            values = dict(zip(names, slices, strict=True))
            for v, array in zip(fixed, flat, strict=True):
                values[v] = jnp.reshape(array, v.aval.shape)
            places = (self.carry[k] for k in kept[:split])
            values |= zip(places, carry, strict=True)
            # A value that follows from others was found after them.
            for v, (result, equations, of) in reversed(self.again.items()):
                (values[v],) = compute_equations(
                    jaxpr, equations, [result], lambda v, of=of: values[of[v]]
                )
            values |= self._compute_values(results, values)
            found = [read_value(v, values) for v in results]
            return found[:split], found[split:]

        first, slices = [carry[k] for k in kept[:split]], [*rows.values()]
        found = scan_as(self.equation, iterate, first, slices)
        rows |= zip(new, found[len(kept) :], strict=True)
        final = dict(zip(kept, found, strict=False))
        late = [jaxpr.outvars[k] for k in after]
        rows |= self._compute_all(late, fixed, rows)
        final |= {k: rows[v] for k, v in zip(after, late, strict=True)}
        for each in self.sums:
            total = each.compute(jaxpr, [rows[v] for v in each.source.invars])
            final[each.place] = carry[each.place] + total
        return [final[k] for k in sorted(final)]

    def _compute_all(
        self, outputs: Sequence[Any], fixed: _Values, rows: _Values
    ) -> dict[Var, Any]:
        """Computes values of all iterations from those in `rows`."""
        outputs = [v for v in outputs if v not in rows]
        if not outputs:
            return {}

        def compute(*slices: Array) -> list[Any]:
            values = {**fixed, **dict(zip(rows, slices, strict=True))}
            return list(self._compute_values(outputs, values).values())

        found = jax.vmap(compute)(*rows.values())
        return dict(zip(outputs, found, strict=True))

    def _compute_values(
        self, outputs: Sequence[Any], values: _Values
    ) -> dict[Var, Any]:
        """Computes those values of an iteration that are not known yet."""
        left = [v for v in dict.fromkeys(variables(outputs)) if v not in values]
        known, equations = values.keys(), self.jaxpr.eqns
        equations = [e for e in equations if known.isdisjoint(e.outvars)]
        equations = needed_equations(equations, left)
        found = compute_equations(
            self.jaxpr, equations, left, values.__getitem__
        )
        return dict(zip(left, found, strict=True))


def rewrite_loops(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Changes what a program's loops store, and returns the new program.

    It computes the same values, apart from rounding.
    """
    return rewrite_programs(traced, _rewrite_program)


def _rewrite_program(program: Jaxpr) -> list[Any]:
    # Loops over blocks use up what they compute, or scatter it.
    blocks = {v for e in program.eqns if splits(e) for v in e.outvars}
    loops = {
        id(e): _Loop(e)
        for e in program.eqns
        if e.primitive.name == "scan" and _is_simple(e)
        if blocks.isdisjoint(variables(e.invars))
    }
    uses = count_uses(program.eqns, variables(program.outvars))
    makers = {v: e for e in program.eqns if id(e) in loops for v in e.outvars}
    for loop in loops.values():
        sources = map(makers.get, variables(loop.equation.invars))
        for source in {id(e): e for e in sources if e is not None}:
            _find_again(loops[source], loop, uses)
        loop.find_moved()
    changed = {key: loop.rewrite() for key, loop in loops.items()}
    return replace_equations(program.eqns, changed)


def _find_again(first: _Loop, second: _Loop, uses: Mapping[Var, int]) -> None:
    """Finds the results of a loop that another one can compute from others.

    Args:
      first: The loop that computes them.
      second: The loop that reads them, each of its iterations.
      uses: How often variables are read.
    """
    slices = {a: v for v, a in second.slices if isinstance(a, Var)}
    known = {
        v: slices[array]
        for v, array in (*first.results, *first.slices)
        if isinstance(v, Var) and isinstance(array, Var) and array in slices
    }
    for place, (variable, result) in enumerate(first.results, len(first.carry)):
        read = slices.get(result)
        if read is None or uses[result] > 1 or isinstance(variable, Literal):
            continue
        if known[variable] is not read:
            continue  # It is stored twice.
        others = {v: of for v, of in known.items() if v is not variable}
        equations = _find_cheap(variable, others, first.jaxpr.eqns)
        if equations:
            second.again[read] = variable, equations, others
            first.dropped.add(place)
            known = others


def _find_cheap(
    variable: Var, known: Mapping[Var, Var], equations: Sequence[Any]
) -> list[Any]:
    """Returns equations by which a value follows from others, if they exist."""
    left = [e for e in equations if known.keys().isdisjoint(e.outvars)]
    needed = needed_equations(left, [variable])
    computed = {v for e in needed for v in e.outvars}
    read = {v for e in needed for v in variables(e.invars)} - computed
    is_cheap = all(e.primitive.name in _CHEAP for e in needed)
    is_cheap &= len(needed) <= _MAX_CHEAP and read <= known.keys()
    return needed if is_cheap else []


def _is_simple(equation: Any) -> bool:
    """Returns whether only arrays go into a loop's body, and out of it."""
    return not equation.params["jaxpr"].consts and not any(
        has_effects(each) or is_collective(each) or references(each)
        for each in (equation, *equations_in(equation))
    )


def _find_sum(
    place: int, before: Any, after: Any, makers: Mapping[Var, Any]
) -> _Sum | None:
    """Finds what an iteration adds to a carry, if it is a sum."""
    addition = _find_maker(after, makers)
    if addition is None or addition.primitive.name not in ("add", "add_any"):
        return None
    terms = [v for v in addition.invars if v is not before]
    term: Any = terms[0] if len(terms) == 1 else None
    moves: list[Any] = []
    found: _Sum | None = None
    while (source := _find_maker(term, makers)) is not None:
        name, read = source.primitive.name, variables(source.invars)
        dtypes = [get_shape(v.aval).dtype for v in (before, term, *read)]
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            break
        is_sum = name in (_PRODUCT, "reduce_sum")
        if is_sum and len(read) == len(source.invars):
            dtype = jnp.promote_types(before.aval.dtype, term.aval.dtype)
            found = _Sum(place, dtype, source, moves[::-1])
        if name not in ("reduce_sum", *_MOVES):
            break
        # Sums of sums are sums, too.
        moves.append(source)
        term = source.invars[0]
    return found


def _find_maker(value: Any, makers: Mapping[Var, Any]) -> Any:
    return makers.get(value) if isinstance(value, Var) else None


def _count_bytes(*each: Any) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in each)
