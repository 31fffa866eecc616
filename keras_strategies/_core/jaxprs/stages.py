"""A traced function cut into stages: what waits for how many collectives.

References (`jax.new_ref`) carry values from one equation to another besides:
whoever uses one waits for all that was written to it, and needs it written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
)

from keras_strategies._types import Array, Equation

# Effects not seen outside of the program: that an equation knows a mapped
# axis, and what it does to a reference.
_SILENT = {
    *("NamedAxisEffect", "InternalMutableArrayEffect"),
    *("ReadEffect", "WriteEffect", "AccumEffect"),
}


def outputs_waiting(jaxpr: Jaxpr, stages: Sequence[int]) -> list[int]:
    """How many collectives' results each output waits for.

    Args:
      jaxpr: A program that takes the results of collectives as inputs.
      stages: For each input 0, or the number of the collective that it is a
        result of, from 1.
    """
    return _of_outputs(jaxpr, _flow(jaxpr, stages))


def outputs_differing(jaxpr: Jaxpr, are_own: Sequence[bool]) -> list[bool]:
    """Whether each output may differ between the replicas.

    Args:
      jaxpr: A program without collectives.
      are_own: Whether each input may.
    """
    flow = _flow(jaxpr, are_own, _is_own)
    return list(map(bool, _of_outputs(jaxpr, flow)))


def part(
    traced: ClosedJaxpr, outputs: Sequence[int], acting: Iterable[Any] = ()
) -> ClosedJaxpr:
    """The part of a program that some of its outputs need.

    Args:
      traced: The program.
      outputs: Positions of its outputs.
      acting: Equations that are kept for what they do.
    """
    jaxpr = traced.jaxpr
    outvars = [jaxpr.outvars[k] for k in outputs]
    kept = set(map(id, acting))
    needed = needed_equations(jaxpr.eqns, outvars, lambda e: id(e) in kept)
    return traced.replace(jaxpr=jaxpr.replace(eqns=needed, outvars=outvars))


def needed_equations(
    equations: Sequence[Any],
    outputs: Iterable[Any],
    is_kept: Callable[[Any], bool],
) -> list[Any]:
    """Returns the equations that outputs, or others that are kept, need.

    Args:
      equations: The equations of a program, in their order.
      outputs: Variables and literals.
      is_kept: Whether an equation is kept for what it does.
    """
    needed, kept = set(variables(outputs)), []
    for equation in reversed(equations):
        made = [*equation.outvars, *references(equation)]
        if is_kept(equation) or not needed.isdisjoint(made):
            kept.append(equation)
            needed.update(variables(equation.invars))
    return kept[::-1]


def computed(
    jaxpr: Jaxpr,
    equations: Sequence[Any],
    outputs: Sequence[Var],
    value_of: Callable[[Var], Any],
) -> list[Any]:
    """Computes some equations of a program, in their order.

    Args:
      jaxpr: The program.
      equations: The equations.
      outputs: The variables that they make whose values are returned.
      value_of: Returns the value of a variable that they read.
    """
    own = {v for equation in equations for v in equation.outvars}
    used = [v for equation in equations for v in variables(equation.invars)]
    read = dict.fromkeys(v for v in used if v not in own)
    part = jaxpr.replace(
        constvars=[],
        invars=list(read),
        outvars=list(outputs),
        eqns=list(equations),
    )
    return jaxpr_as_fun(ClosedJaxpr(part, []))(*map(value_of, read))


def with_consts_as_inputs(traced: ClosedJaxpr) -> Jaxpr:
    """Returns the jaxpr whose first inputs are its constants."""
    jaxpr = traced.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def variables(operands: Iterable[Any]) -> list[Var]:
    """Returns the operands that are no literals."""
    return [v for v in operands if not isinstance(v, Literal)]


def value_of(operand: Var | Literal, values: Mapping[Var, Any]) -> Array:
    """Returns the value of a variable or a literal."""
    return operand.val if isinstance(operand, Literal) else values[operand]


def shape_of(value: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or of a variable's `aval`."""
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def acting(jaxpr: Jaxpr, stages: Sequence[int], stage: int) -> list[Any]:
    """The equations with effects (prints, callbacks) of one stage."""
    waits = _flow(jaxpr, stages)
    return [
        equation
        for equation in jaxpr.eqns
        if acts(equation)
        and max(_values(equation.invars, waits), default=0) == stage
    ]


def acts(equation: JaxprEqn) -> bool:
    """Whether an equation does something that is seen: prints, calls Python."""
    return any(
        type(effect).__name__ not in _SILENT for effect in equation.effects
    )


def has_answers(jaxpr: Jaxpr) -> bool:
    """Whether Python is called for values (`io_callback`)."""
    return any(
        acts(equation)
        and not all(isinstance(v, DropVar) for v in equation.outvars)
        for equation in jaxpr.eqns
    )


def has_references(jaxpr: Jaxpr) -> bool:
    """Whether values go from one equation to another by references."""
    return any(map(references, jaxpr.eqns))


def _flow(
    jaxpr: Jaxpr,
    inputs: Sequence[int],
    of_equation: Callable[[Any], int] = lambda equation: 0,
) -> dict[Var, int]:
    """The largest number among all that each value was made of."""
    flow: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    flow.update((variable, 0) for variable in jaxpr.constvars)
    for equation in jaxpr.eqns:
        found = max(_values(equation.invars, flow), default=0)
        found = max(found, of_equation(equation))
        made = [*equation.outvars, *references(equation)]
        flow.update((variable, found) for variable in made)
    return flow


def _of_outputs(jaxpr: Jaxpr, flow: dict[Var, int]) -> list[int]:
    return [0 if isinstance(v, Literal) else flow[v] for v in jaxpr.outvars]


def _values(operands: Sequence[Any], flow: dict[Var, int]) -> list[int]:
    return [flow[v] for v in variables(operands)]


def references(equation: Equation) -> list[Var]:
    """The references among an equation's operands and results."""
    return [
        variable
        for variable in (*equation.invars, *equation.outvars)
        if is_reference(variable)
    ]


def is_reference(variable: Var | Literal) -> bool:
    """Whether a variable is a reference (`jax.new_ref`), and no value."""
    return type(variable.aval).__name__ == "AbstractRef"


def _is_own(equation: JaxprEqn) -> bool:
    """Whether results may differ though the operands are the same on all.

    So do a replica's number, and what Python answers.
    """
    return any(
        each.primitive.name == "axis_index" or acts(each)
        for each in (equation, *equations_in(equation))
    )


def all_equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """The equations of a jaxpr, closed or not, and those in them, each once."""
    seen: set[int] = set()
    waiting = [getattr(jaxpr, "jaxpr", jaxpr)]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in seen:
            seen.add(id(inner))
            yield from inner.eqns
            for equation in inner.eqns:
                waiting += jaxprs_in_params(equation.params)


def equations_in(equation: JaxprEqn) -> Iterator[Any]:
    """All equations of the jaxprs among an equation's parameters."""
    for inner in jaxprs_in_params(equation.params):
        yield from all_equations(inner)


def scan_operands(
    equation: JaxprEqn, values: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits what belongs to the operands of a `scan` by what they are.

    Args:
      equation: An equation of `jax.lax.scan`.
      values: One for each operand.

    Returns:
      Those of the constants, of the carry, and of what is scanned.
    """
    params = equation.params
    if "ft_in" in params:  # Of JAX 0.12.
        parts = params["ft_in"].update(list(values)).unpack()
        consts, carry, scanned = map(list, parts)
        return consts, carry, scanned
    split = params["num_consts"]
    end = split + params["num_carry"]
    return list(values[:split]), list(values[split:end]), list(values[end:])


def names_in(*groups: str) -> tuple[str, ...]:
    """Returns the names of primitives in texts, which spaces separate."""
    return tuple(name for group in groups for name in group.split())
