"""Divides traced functions into stages that are separated by collectives.

An equation is in stage k if the last collective on whose results it depends is
number k (counted from 1). It is in stage 0 if it depends on no collective.
Values also flow between equations through references (`jax.new_ref`): an
equation that uses a reference depends on all equations that wrote to it.
"""

import operator
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


def names_in(*groups: str) -> tuple[str, ...]:
    """Splits strings at spaces into names, such as those of primitives."""
    return tuple(name for group in groups for name in group.split())


SUM_IF = "ks_sum_if"
"""The name of the function in the traces of `replica_map.sum_if`: its last
equation is a `cond` of computing arrays, and of computing and summing them."""

# Effects that are not visible outside of the program: uses of a mapped axis,
# and reads and writes of references.
_SILENT = names_in(
    "NamedAxisEffect InternalMutableArrayEffect",
    "ReadEffect WriteEffect AccumEffect",
)
COLLECTIVES = names_in("psum pmax pmin all_gather reduce_scatter ppermute")


def find_output_stages(jaxpr: Jaxpr, stages: Sequence[int]) -> list[int]:
    """Returns the number of the last collective that each output depends on.

    This number is the output's stage. Collectives are counted from 1, and the
    stage is 0 if an output depends on no collective.

    Args:
      jaxpr: A program that takes the results of collectives as inputs.
      stages: For each input: if it is a result of a collective, the number of
        that collective (counted from 1), else 0.
    """
    return _read_outputs(jaxpr, flow_numbers(jaxpr, stages))


def find_differing_outputs(
    jaxpr: Jaxpr, may_differ: Sequence[bool]
) -> list[bool]:
    """Returns whether each output may differ between the replicas.

    Args:
      jaxpr: A program without collectives.
      may_differ: Whether each input may differ between the replicas.
    """
    flow = flow_numbers(jaxpr, may_differ, _may_differ)
    return list(map(bool, _read_outputs(jaxpr, flow)))


def select_outputs(
    traced: ClosedJaxpr, outputs: Sequence[int], kept: Iterable[Any] = ()
) -> ClosedJaxpr:
    """Returns a program that computes only some of the outputs.

    Args:
      traced: The program.
      outputs: Positions of the outputs to compute.
      kept: Equations that are kept for their side effects.
    """
    jaxpr = traced.jaxpr
    outvars = [jaxpr.outvars[k] for k in outputs]
    ids = set(map(id, kept))
    needed = needed_equations(jaxpr.eqns, outvars, lambda e: id(e) in ids)
    return traced.replace(jaxpr=jaxpr.replace(eqns=needed, outvars=outvars))


def needed_equations(
    equations: Sequence[Any],
    outputs: Iterable[Any],
    is_kept: Callable[[Any], bool] = lambda equation: False,
) -> list[Any]:
    """Returns the equations on which outputs or kept equations depend.

    Args:
      equations: The equations of a program, in their order.
      outputs: Variables and literals.
      is_kept: A function that returns whether an equation is kept for its side
        effects.
    """
    needed, kept = set(variables(outputs)), []
    for equation in reversed(equations):
        written = [*equation.outvars, *references(equation)]
        if is_kept(equation) or not needed.isdisjoint(written):
            kept.append(equation)
            needed.update(variables(equation.invars))
    return kept[::-1]


def compute_equations(
    jaxpr: Jaxpr,
    equations: Sequence[Any],
    outputs: Sequence[Var],
    read_value: Callable[[Var], Any],
) -> list[Any]:
    """Computes some equations of a program, in their order.

    Args:
      jaxpr: The program.
      equations: The equations.
      outputs: Those results of the equations whose values are returned.
      read_value: A function that returns the value of a variable that the
        equations read.
    """
    results = {v for equation in equations for v in equation.outvars}
    used = [v for equation in equations for v in variables(equation.invars)]
    read = dict.fromkeys(v for v in used if v not in results)
    program = jaxpr.replace(
        constvars=[],
        invars=list(read),
        outvars=list(outputs),
        eqns=list(equations),
    )
    return jaxpr_as_fun(ClosedJaxpr(program, []))(*map(read_value, read))


def update_values(
    jaxpr: Jaxpr, equations: Sequence[Any], values: dict[Var, Any]
) -> None:
    """Computes some equations of a program, and adds their results to `values`.

    Args:
      jaxpr: The program.
      equations: The equations.
      values: The values of the variables that they read; changed in place.
    """
    results = [v for equation in equations for v in equation.outvars]
    results = [v for v in results if not isinstance(v, DropVar)]
    arrays = compute_equations(jaxpr, equations, results, values.__getitem__)
    values.update(zip(results, arrays, strict=True))


def with_consts_as_inputs(traced: ClosedJaxpr) -> Jaxpr:
    """Returns the jaxpr with its constants as additional first inputs."""
    jaxpr = traced.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def variables(operands: Iterable[Any]) -> list[Var]:
    """Returns the variables among operands, without the literals."""
    return [v for v in operands if not isinstance(v, Literal)]


def read_value(operand: Var | Literal, values: Mapping[Var, Any]) -> Array:
    """Returns the value of a variable or a literal."""
    return operand.val if isinstance(operand, Literal) else values[operand]


def get_shape(value: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or of a variable's `aval`."""
    weak = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def find_effects(jaxpr: Jaxpr, stages: Sequence[int], new: range) -> list[Any]:
    """Returns the new stages' equations with effects (prints, callbacks)."""
    waits = flow_numbers(jaxpr, stages)
    return [
        equation
        for equation in jaxpr.eqns
        if has_effects(equation)
        and max(_values(equation.invars, waits), default=0) in new
    ]


def has_effects(equation: JaxprEqn) -> bool:
    """Returns whether an equation has side effects (prints, callbacks)."""
    names = {type(effect).__name__ for effect in equation.effects}
    return not names.issubset(_SILENT)


def has_answers(jaxpr: Jaxpr) -> bool:
    """Returns whether a program calls back into Python to get values.

    An example is `io_callback`.
    """
    return any(
        has_effects(equation)
        and not all(isinstance(v, DropVar) for v in equation.outvars)
        for equation in jaxpr.eqns
    )


def has_references(jaxpr: Jaxpr) -> bool:
    """Returns whether equations exchange values through references."""
    return any(map(references, jaxpr.eqns))


def flow_numbers(
    jaxpr: Jaxpr,
    inputs: Sequence[int],
    equation_minimum: Callable[[Any], int] = lambda equation: 0,
) -> dict[Var, int]:
    """Propagates numbers, such as stages, from inputs to all results.

    The number of a result is the largest number among the operands of the
    equation that computes it.

    Args:
      jaxpr: The program.
      inputs: The number of each input.
      equation_minimum: A function that returns a minimum for the numbers of an
        equation's results.
    """
    flow: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    flow.update((variable, 0) for variable in jaxpr.constvars)
    for equation in jaxpr.eqns:
        number = max(_values(equation.invars, flow), default=0)
        number = max(number, equation_minimum(equation))
        # Every equation that uses a reference is assumed to write to it.
        written = [*equation.outvars, *references(equation)]
        flow.update((variable, number) for variable in written)
    return flow


def _read_outputs(jaxpr: Jaxpr, flow: dict[Var, int]) -> list[int]:
    return [0 if isinstance(v, Literal) else flow[v] for v in jaxpr.outvars]


def _values(operands: Sequence[Any], flow: dict[Var, int]) -> list[int]:
    return [flow[v] for v in variables(operands)]


def references(equation: Equation) -> list[Var]:
    """Returns the references among an equation's operands and results."""
    values = (*equation.invars, *equation.outvars)
    return list(filter(is_reference, values))


def is_reference(variable: Var | Literal) -> bool:
    """Returns whether a variable is a reference (`jax.new_ref`)."""
    return type(variable.aval).__name__ == "AbstractRef"


def _may_differ(equation: JaxprEqn) -> bool:
    """Returns whether results may differ even if the operands are replicated.

    Replica ids and results of Python callbacks may differ.
    """
    return any(
        each.primitive.name == "axis_index" or has_effects(each)
        for each in (equation, *equations_in(equation))
    )


def all_equations(
    jaxpr: Jaxpr | ClosedJaxpr,
    skips: Callable[[Any], bool] = lambda equation: False,
) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all nested jaxprs, each once.

    Args:
      jaxpr: The jaxpr.
      skips: A function that returns whether to skip an equation's jaxprs.
    """
    seen: set[int] = set()
    waiting = [getattr(jaxpr, "jaxpr", jaxpr)]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in seen:
            seen.add(id(inner))
            yield from inner.eqns
            for equation in inner.eqns:
                if not skips(equation):
                    waiting += jaxprs_in_params(equation.params)


def has_primitives(jaxpr: Jaxpr | ClosedJaxpr, *names: str) -> bool:
    """Returns whether a program, or one in it, computes certain primitives."""
    return any(e.primitive.name in names for e in all_equations(jaxpr))


def equations_in(equation: JaxprEqn) -> Iterator[Any]:
    """Yields all equations of the jaxprs among an equation's parameters."""
    for inner in jaxprs_in_params(equation.params):
        yield from all_equations(inner)


def reduced_dims(equation: Equation) -> tuple[int, ...]:
    """Returns the dimensions that a collective reduces within each device.

    A collective over an axis of `jax.vmap(..., axis_name=...)` is traced as one
    over a dimension of its operands.
    """
    axes = equation.params.get("axes", ())
    return tuple(axis for axis in axes if isinstance(axis, int))


def is_collective(equation: Equation) -> bool:
    """Returns whether devices communicate in an equation."""
    if not equation.primitive.name.startswith(COLLECTIVES):
        return False
    axes = equation.params.get("axes")
    return axes is None or len(reduced_dims(equation)) < len(axes)


def rewrite_programs(
    traced: ClosedJaxpr, rewrite: Callable[[Jaxpr], Sequence[Any]]
) -> ClosedJaxpr:
    """Rewrites a program and the programs that its equations call.

    Programs that are mapped over devices inside of this one stay unchanged.

    Args:
      traced: The program.
      rewrite: A function that returns the new equations of a program whose
        equations call programs that are rewritten already.

    Returns:
      The new program, or the same program if no equation changes.
    """
    # Programs that several equations call are changed once, and stay one.
    changed: dict[int, Any] = {}

    def change(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr | Jaxpr):
            if id(param) not in changed:
                changed[id(param)] = change_program(param)
            return changed[id(param)]
        if not isinstance(param, tuple):
            return param
        entries = list(map(change, param))
        if all(map(operator.is_, entries, param)):
            return param
        make: Any = getattr(type(param), "_make", tuple)  # Of a named tuple.
        return make(entries)

    def change_program(program: Any) -> Any:
        # Since JAX 0.11, one class is that of closed and of open programs.
        inner: Any = getattr(program, "jaxpr", program)
        if inner is not program:
            new = change(inner)
            return program if new is inner else program.replace(jaxpr=new)
        program = _with_equations(program, map(change_equation, program.eqns))
        return _with_equations(program, rewrite(program))

    def change_equation(equation: Any) -> Any:
        before = equation.params
        if equation.primitive.name == "shard_map":
            return equation
        params = {key: change(param) for key, param in before.items()}
        is_same = all(map(operator.is_, params.values(), before.values()))
        return equation if is_same else equation.replace(params=params)

    return change(traced)


def _with_equations(program: Any, new: Iterable[Any]) -> Any:
    equations = list(new)
    is_same = len(equations) == len(program.eqns)
    is_same &= all(map(operator.is_, equations, program.eqns))
    return program if is_same else program.replace(eqns=equations)


def scan_operands(
    equation: JaxprEqn, values: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits a list of values for the operands of a `scan` into three groups.

    Args:
      equation: An equation of `jax.lax.scan`.
      values: One value for each operand.

    Returns:
      The values of the constants, of the carry, and of the scanned operands.
    """
    params = equation.params
    if "ft_in" in params:  # JAX 0.12.
        parts = params["ft_in"].update(list(values)).unpack()
        consts, carry, scanned = map(list, parts)
        return consts, carry, scanned
    split = params["num_consts"]
    end = split + params["num_carry"]
    return list(values[:split]), list(values[split:end]), list(values[end:])
