"""A traced function cut into stages: what waits for how many collectives."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var


def waiting(jaxpr: Jaxpr, stages: Sequence[int]) -> dict[Var, int]:
    """How many collectives' results each value waits for.

    Args:
      jaxpr: A program that takes the results of collectives as inputs.
      stages: For each input 0, or the number of the collective that it is a
        result of, from 1.
    """
    waits = dict(zip(jaxpr.invars, stages, strict=True))
    waits.update((variable, 0) for variable in jaxpr.constvars)
    for equation in jaxpr.eqns:
        latest = max(_waits_for(equation.invars, waits), default=0)
        waits.update((variable, latest) for variable in equation.outvars)
    return waits


def outputs_waiting(jaxpr: Jaxpr, stages: Sequence[int]) -> list[int]:
    """The same for each output; see `waiting`."""
    waits = waiting(jaxpr, stages)
    return [
        0 if isinstance(variable, Literal) else waits[variable]
        for variable in jaxpr.outvars
    ]


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
    needed = {v for v in outvars if not isinstance(v, Literal)}
    kept, acting = [], set(map(id, acting))
    for equation in reversed(jaxpr.eqns):
        if id(equation) in acting or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed |= {v for v in equation.invars if not isinstance(v, Literal)}
    return traced.replace(jaxpr=jaxpr.replace(eqns=kept[::-1], outvars=outvars))


def acting(jaxpr: Jaxpr, stages: Sequence[int], stage: int) -> list[Any]:
    """The equations with effects (prints, callbacks) of one stage."""
    waits = waiting(jaxpr, stages)
    return [
        equation
        for equation in jaxpr.eqns
        if acts(equation)
        and max(_waits_for(equation.invars, waits), default=0) == stage
    ]


def acts(equation: Any) -> bool:
    """Whether an equation does something: prints, calls Python.

    That it knows the replica axis is an effect to JAX, too.
    """
    return any(
        type(effect).__name__ != "NamedAxisEffect"
        for effect in equation.effects
    )


def _waits_for(operands: Sequence[Any], waits: dict[Var, int]) -> list[int]:
    return [waits[v] for v in operands if not isinstance(v, Literal)]
