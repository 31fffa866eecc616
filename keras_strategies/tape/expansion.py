"""Computes the gradients of tapes in a trace, by `jax.vjp`.

A call of `gradient` is an equation of the trace. The equations between its
sources and its targets that the tape recorded are its path. They are evaluated
together with their derivative, so that no operation is computed twice, and the
rest of the program reads what they return. In the path of an outer tape there
may be a gradient of an inner one: it is a function of the sources, too.
"""

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal

from keras_strategies._types import Array, Equation
from keras_strategies.passes import stages
from keras_strategies.passes.collective_cut import find_called_jaxpr
from keras_strategies.tape.primitives import (
    add_tangent,
    gradient_p,
    is_inexact,
    is_recorded,
    read_p,
    split_operands,
)

_CONSTANT = frozenset(
    stages.names_in(read_p.name, "stop_gradient floor ceil round")
)
"""Primitives that end a path: TensorFlow's gradients through them are None.

What a variable was assigned is not a source of what it returns when it is read.
"""


def expand_tapes(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program that computes the gradients of its tapes.

    Args:
      traced: The program. It is returned as it is if it has no tapes.
    """
    if not may_have_tapes() or not any(
        map(_is_of_tape, stages.all_equations(traced))
    ):
        return traced
    compute = functools.partial(_Expansion(traced.jaxpr).compute, traced.consts)
    return jax.make_jaxpr(compute)(*map(stages.get_shape, traced.in_avals))


def may_have_tapes() -> bool:
    """Returns whether this process uses tapes at all."""
    return "keras_strategies.tape.gradient_tape" in sys.modules


def find_path(
    equations: Sequence[Any],
    sources: Iterable[Any],
    targets: Iterable[Any],
    mark: str,
) -> tuple[list[Any], set[Any]]:
    """Finds how targets depend on sources.

    Args:
      equations: The equations of the program before the gradient.
      sources: The variables of the sources.
      targets: The variables of the targets.
      mark: The mark of the tape, which must have recorded the equations.

    Returns:
      The equations by which the targets depend on the sources, and the
      variables that depend on a source, or are one, and on which a target
      depends.
    """
    reached, found = set(stages.variables(sources)), []
    for equation in equations:
        results = _find_results(equation, reached)
        if results and is_recorded(equation, mark):
            reached.update(results)
            found.append(equation)
    needed, path = set(stages.variables(targets)), []
    for equation in reversed(found):
        if not needed.isdisjoint(equation.outvars):
            path.append(equation)
            needed.update(stages.variables(equation.invars))
    return path[::-1], needed & reached


def _find_results(equation: Equation, reached: set[Any]) -> list[Any]:
    """Returns the results with a derivative with respect to some variables."""
    if reached.isdisjoint(stages.variables(equation.invars)) or (
        equation.primitive.name in _CONSTANT
    ):
        return []
    results, called = equation.outvars, find_called_jaxpr(equation)
    if called is not None:
        inner, _ = called
        pairs = zip(inner.invars, equation.invars, strict=True)
        within = {v for v, outer in pairs if _is_in(outer, reached)}
        for each in inner.eqns:
            within.update(_find_results(each, within))
        pairs = zip(results, inner.outvars, strict=True)
        results = [v for v, result in pairs if _is_in(result, within)]
    kept = [v for v in results if not isinstance(v, DropVar)]
    return [v for v in kept if is_inexact(v.aval)]


class _Values:
    """The values of a program's variables.

    Args:
      known: The values by variable.
      offsets: For variables with respect to which a gradient is computed, but
        which are computed themselves: what is added to their tangents.
    """

    def __init__(self, known: dict[Any, Any], offsets: dict[Any, Any]) -> None:
        self.known, self._offsets = known, offsets

    def __getitem__(self, variable: Any) -> Any:
        return stages.read_value(variable, self.known)

    def put(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Sets the values of variables."""
        for variable, value in zip(variables, values, strict=True):
            if variable in self._offsets:
                value = add_tangent(value, self._offsets[variable])
            self.known[variable] = value

    def is_split_at(self, equation: Equation) -> bool:
        """Returns whether an equation must be computed by itself."""
        is_read = equation.primitive is read_p
        return is_read or any(v in self._offsets for v in equation.outvars)

    def within(
        self, free: dict[Any, Any], offsets: dict[Any, Any], computed: set[Any]
    ) -> "_Values":
        """Returns the values with which a path is computed once more."""
        known = {v: x for v, x in self.known.items() if v not in computed}
        return _Values(known | free, self._offsets | offsets)


class _Expansion:
    """The evaluation of a program with gradients of tapes.

    Args:
      jaxpr: The program.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._equations = list(map(_expand_inner, jaxpr.eqns))
        self._paths: dict[int, list[Any]] = {}
        for k, equation in enumerate(self._equations):
            if equation.primitive is gradient_p:
                targets, _, sources = split_operands(equation)
                before, mark = self._equations[:k], equation.params["mark"]
                path, _ = find_path(before, sources, targets, mark)
                self._paths[id(equation)] = path

    def compute(self, consts: Sequence[Any], *inputs: Array) -> list[Any]:
        """Returns the program's outputs."""
        known = dict(zip(self._jaxpr.constvars, consts, strict=True))
        known |= zip(self._jaxpr.invars, inputs, strict=True)
        values = _Values(known, {})
        self._run(self._equations, values)
        return [values[v] for v in self._jaxpr.outvars]

    def _run(self, equations: Sequence[Any], values: _Values) -> None:
        """Computes equations, those of paths together with their gradients."""
        gradients = [e for e in equations if e.primitive is gradient_p]
        inner = {id(e) for g in gradients for e in self._paths[id(g)]}
        done: set[int] = set()
        for gradient in gradients:
            if id(gradient) not in inner:
                left = [e for e in equations if id(e) not in done]
                done |= self._differentiate(gradient, left, values)
        self._compute([e for e in equations if id(e) not in done], values)

    def _compute(self, equations: Sequence[Any], values: _Values) -> None:
        """Computes equations without gradients, in their order."""
        groups = itertools.groupby(equations, values.is_split_at)
        for is_split, group in groups:
            rest = list(group)
            for part in [[e] for e in rest] if is_split else [rest]:
                values.put(*self._evaluate(part, values))

    def _evaluate(
        self, equations: Sequence[Any], values: _Values
    ) -> tuple[list[Any], list[Any]]:
        """Returns the results of equations, and their values."""
        if equations[0].primitive is read_p:
            return equations[0].outvars, [values[equations[0].invars[0]]]
        results = _find_outputs(equations)
        return results, stages.compute_equations(
            self._jaxpr, equations, results, values.known.__getitem__
        )

    def _differentiate(
        self, gradient: Equation, equations: Sequence[Any], values: _Values
    ) -> set[int]:
        """Computes a gradient, and the equations of its path.

        Args:
          gradient: The gradient's equation.
          equations: The equations that are not computed yet.
          values: The values of all others.

        Returns:
          The ids of the equations that are computed now.
        """
        targets, seeds, sources = split_operands(gradient)
        path = self._paths[id(gradient)]
        computed = _find_outputs(path)
        on_path, done = set(computed), {id(gradient), *map(id, path)}
        read = [v for e in self._with_inner_paths(path) for v in e.invars]
        read += [*targets, *seeds, *sources]
        missing = {*stages.variables(read)} - on_path - values.known.keys()
        before = stages.needed_equations(equations, missing)
        self._run(before, values)
        done |= set(map(id, before))
        source_variables = dict.fromkeys(stages.variables(sources))
        free = [v for v in source_variables if v not in on_path]
        others = [v for v in source_variables if v in on_path]

        def forward(arrays: list[Any], offsets: list[Any]) -> Any:
            inner = values.within(
                dict(zip(free, arrays, strict=True)),
                dict(zip(others, offsets, strict=True)),
                on_path,
            )
            self._run(path, inner)
            results = [inner[v] for v in targets]
            return results, [inner.known[v] for v in computed]

        avals: list[Any] = [v.aval for v in others]
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        _, pull_back, arrays = jax.vjp(
            forward, [values[v] for v in free], zeros, has_aux=True
        )
        # They have the tangents of outer gradients already.
        values.known.update(zip(computed, arrays, strict=True))
        by_free, by_others = pull_back([values[v] for v in seeds])
        found = dict(zip([*free, *others], [*by_free, *by_others], strict=True))
        values.put(gradient.outvars, [found[v] for v in sources])
        return done

    def _with_inner_paths(self, path: Sequence[Any]) -> Iterator[Any]:
        """Yields the equations of a path, and of the paths of inner tapes."""
        for equation in path:
            yield equation
            yield from self._with_inner_paths(self._paths.get(id(equation), ()))


def _expand_inner(equation: Equation) -> Equation:
    """Expands the tapes of the functions that an equation calls."""

    def expand(param: Any) -> Any:
        if isinstance(param, tuple):
            entries = tuple(map(expand, param))
            return entries if entries != param else param
        if not isinstance(param, ClosedJaxpr | Jaxpr):
            return param
        program: Any = param  # Since JAX 0.11, one class is that of both.
        if hasattr(program, "consts"):
            return expand_tapes(program)
        traced = expand_tapes(ClosedJaxpr(program, []))
        assert not traced.consts
        return traced.jaxpr

    if not any(map(_is_of_tape, stages.equations_in(equation))):
        return equation
    params = {name: expand(param) for name, param in equation.params.items()}
    return equation.replace(params=params)


def _find_outputs(equations: Sequence[Any]) -> list[Any]:
    outputs = [v for equation in equations for v in equation.outvars]
    return [v for v in outputs if not isinstance(v, DropVar)]


def _is_of_tape(equation: Equation) -> bool:
    return equation.primitive in (read_p, gradient_p)


def _is_in(variable: Any, variables: set[Any]) -> bool:
    return not isinstance(variable, Literal) and variable in variables
