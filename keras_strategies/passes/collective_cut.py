"""Cuts a program at its collectives, so that it runs without communication.

Replicas that take different branches cannot communicate inside them. So each
branch's program is cut at its collectives: the operands of each collective
become additional outputs of the program, and its results become additional
inputs. The caller computes the collectives outside of the branches.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from keras_strategies._types import Array, Equation
from keras_strategies.passes import stages
from keras_strategies.passes.stages import is_collective

CALLS = stages.names_in(
    "jit pjit closed_call core_call remat2 checkpoint",
    "custom_jvp_call custom_vjp_call custom_lin",
)
"""Primitives that call a jaxpr."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A program that was cut at its collectives.

    Attributes:
      jaxpr: The program. Its inputs are the original ones, followed by the
        collectives' results. Its outputs are the collectives' operands,
        followed by the original ones.
      collectives: The equations of the collectives at which the program was
        cut, in program order.
    """

    jaxpr: ClosedJaxpr
    collectives: list[Any]

    @property
    def operands(self) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes and dtypes of each collective's operands."""
        return [_shapes(e.invars) for e in self.collectives]

    @property
    def results(self) -> list[list[jax.ShapeDtypeStruct]]:
        """The shapes and dtypes of each collective's results."""
        return [_shapes(e.outvars) for e in self.collectives]


def cut_at_collectives(traced: ClosedJaxpr) -> Cut:
    """Cuts a program at its collectives.

    Args:
      traced: The program. Functions that it calls are inlined if they contain
        collectives.

    Raises:
      RuntimeError: if a loop or a branch contains a collective.
    """
    inline = functools.partial(_inline, traced.jaxpr, traced.consts)
    inlined = jax.make_jaxpr(inline)(*_shapes(traced.jaxpr.invars))
    jaxpr = inlined.jaxpr
    collectives = list(filter(is_collective, jaxpr.eqns))
    operands = [v for e in collectives for v in e.invars]
    results = [
        Var(v.aval) if isinstance(v, DropVar) else v
        for e in collectives
        for v in e.outvars
    ]
    program = jaxpr.replace(
        invars=[*jaxpr.invars, *results],
        outvars=[*operands, *jaxpr.outvars],
        eqns=[e for e in jaxpr.eqns if not is_collective(e)],
    )
    return Cut(jaxpr=inlined.replace(jaxpr=program), collectives=collectives)


def add_collectives(cut: Cut, other: Cut) -> Cut | None:
    """Extends a program so that it has all collectives of another program.

    The operands of the added collectives are zeros. Programs of the same code
    may have different collectives, because JAX does not compute gradients that
    are known to be zero, and then the collectives of their backward pass are
    missing.

    Args:
      cut: The program with fewer collectives.
      other: A program of the same code with more collectives.

    Returns:
      The extended program, or None if it is ambiguous which collectives of
      `other` correspond to those of `cut`.
    """
    keys, all_keys = map(_collective_keys, (cut.collectives, other.collectives))
    places = _places(keys, all_keys)
    last = _places(keys[::-1], all_keys[::-1])
    # The match is unambiguous if a search from the front and one from the back
    # find the same positions.
    if places is None or last is None:
        return None
    if places != [len(all_keys) - 1 - k for k in reversed(last)]:
        return None
    structure = jax.tree.structure((cut.operands, None))
    count = len(cut.jaxpr.in_avals) - sum(map(len, cut.results))

    def program(
        inputs: list[Any], known: list[Any]
    ) -> tuple[list[list[Any]], list[Any]]:
        results = jax.tree.leaves([known[k] for k in places])
        leaves = jaxpr_as_fun(cut.jaxpr)(*inputs, *results)
        number = structure.num_leaves
        cut_operands, _ = jax.tree.unflatten(structure, leaves[:number])
        operands = jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, shape.dtype), other.operands
        )
        for place, values in zip(places, cut_operands, strict=True):
            operands[place] = values
        return operands, leaves[number:]

    inputs = _shapes(cut.jaxpr.jaxpr.invars[:count])
    jaxpr = jax.make_jaxpr(program)(inputs, other.results)
    return Cut(jaxpr=jaxpr, collectives=other.collectives)


def _collective_keys(collectives: Sequence[Any]) -> list[Any]:
    """Returns a key per collective: its primitive, shapes and name scope."""
    return [
        (
            equation.primitive.name,
            [(s.shape, s.dtype) for s in _shapes(equation.invars)],
            str(equation.source_info.name_stack),
        )
        for equation in collectives
    ]


def _places(keys: Sequence[Any], all_keys: Sequence[Any]) -> list[int] | None:
    """Returns the positions of keys in a longer list, None if one is absent."""
    places: list[int] = []
    for key in keys:
        start = places[-1] + 1 if places else 0
        if key not in all_keys[start:]:
            return None
        places.append(all_keys.index(key, start))
    return places


def reduce(collective: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Computes one of the collectives of a `Cut` from its operands."""
    results = collective.primitive.bind(*operands, **collective.params)
    return list(results) if collective.primitive.multiple_results else [results]


def find_called_jaxpr(equation: Equation) -> tuple[Any, list[Any]] | None:
    """Returns the jaxpr that an equation calls, with its constants, or None."""
    if equation.primitive.name == "call_hi_primitive":
        return _trace_expanded(equation)
    params = equation.params
    called = params.get("jaxpr", params.get("call_jaxpr"))
    if called is None or equation.primitive.name not in CALLS:
        return None
    inner = getattr(called, "jaxpr", called)
    consts = list(getattr(called, "consts", ()))
    is_known = len(consts) == len(inner.constvars)
    if not is_known or len(inner.invars) != len(equation.invars):
        return None
    return inner, consts


def inline_program(
    jaxpr: Jaxpr, inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[Any]:
    """Returns a program's equations with other variables.

    Args:
      jaxpr: The program. Each output is the result of an equation, and no other
        output is the same one.
      inputs: The variables, or literals, that its equations read as its inputs.
      outputs: The variables of its outputs.
    """
    names: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, output in zip(jaxpr.outvars, outputs, strict=True):
        is_read = not isinstance(output, DropVar)
        names[variable] = output if is_read else Var(output.aval)

    def rename(variable: Any) -> Any:
        if isinstance(variable, Literal | DropVar):
            return variable
        return names.setdefault(variable, Var(variable.aval))

    return [
        e.replace(
            invars=list(map(rename, e.invars)),
            outvars=list(map(rename, e.outvars)),
        )
        for e in jaxpr.eqns
    ]


def _trace_expanded(equation: JaxprEqn) -> tuple[Any, list[Any]]:
    """Traces the function that a `call_hi_primitive` of JAX 0.12 calls.

    The equation itself contains no jaxpr.
    """
    called = equation.params["_prim"]

    def expand(*leaves: Array) -> list[Any]:
        return jax.tree.leaves(called.expand(*called.in_tree.unflatten(leaves)))

    traced = jax.make_jaxpr(expand)(*_shapes(equation.invars))
    return traced.jaxpr, list(traced.consts)


def _inline(jaxpr: Jaxpr, consts: Sequence[Any], *inputs: Array) -> list[Array]:
    """Computes a program without calls of functions that communicate."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(operands: Sequence[Any]) -> list[Any]:
        return [stages.read_value(v, values) for v in operands]

    for calls, group in itertools.groupby(jaxpr.eqns, _has_inner_collectives):
        equations = list(group)
        if not calls:
            stages.update_values(jaxpr, equations, values)
            continue
        for equation in equations:
            called = find_called_jaxpr(equation)
            if called is None:
                raise RuntimeError(
                    "If the replicas have different numbers of rows, they must "
                    "not communicate inside a loop or a branch of JAX. "
                    f"Received: a collective in `{equation.primitive.name}`, "
                    "with a batch that cannot be divided equally among the "
                    "replicas. Call the collective outside of the loop or "
                    "branch, or use only batches that can be divided equally "
                    "(`drop_remainder=True`)."
                )
            results = _inline(*called, *read(equation.invars))
            values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _has_inner_collectives(equation: JaxprEqn) -> bool:
    """Returns whether an equation calls a function with collectives."""
    return any(map(is_collective, stages.equations_in(equation)))


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [stages.get_shape(v.aval) for v in variables]
