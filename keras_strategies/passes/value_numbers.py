"""Value numbering, which finds out which traces compute the same."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal

from keras_strategies._types import Array
from keras_strategies.passes.stages import (
    compute_equations,
    equations_in,
    get_shape,
    has_effects,
    names_in,
    references,
    variables,
)

# A rule inside of `shard_map` may use the mapped axes.
_HAVE_RULES = names_in("custom_jvp_call custom_vjp_call shard_map")
# Parameters of the first two.
_RULES = names_in("bwd fwd_jaxpr_thunk jvp_jaxpr_fun out_trees")
_MAX_DEPTH = 8
"""The number of custom rules, each of which calls the next, that are traced."""


class ValueNumbers:
    """A numbering of values, in which equal numbers mean equal values.

    This is value numbering (Alpern, Wegman and Zadeck, 1988) over several
    traced functions of the same inputs: values get the same number if the same
    operations compute them from the same inputs. In doubtful cases (side
    effects, or Python functions among an equation's parameters) the numbers
    differ.

    Args:
      trace_rule: A function that traces the derivatives of one equation of a
        jaxpr. Custom rules for derivatives, which are Python functions, are
        then compared by these traces.
    """

    def __init__(
        self,
        trace_rule: Callable[[Jaxpr, Any], ClosedJaxpr] | None = None,
    ) -> None:
        self._trace_rule = trace_rule
        self._numbers: dict[Any, int] = {}
        # Objects whose ids are used in keys. They are kept alive so that their
        # ids are not reused.
        self._held: list[Any] = []
        # The keys of traced rules, by their equations' numbers and callers.
        self._rules: dict[Hashable, Hashable] = {}
        # The functions whose rules are being traced, each called by the rule of
        # the one before; None while the rules do not matter.
        self._callers: tuple[Hashable, ...] | None = ()

    def number_outputs(self, traced: ClosedJaxpr) -> list[int]:
        """Returns the number assigned to each output of a traced function."""
        consts = [self.number_object(const) for const in traced.consts]
        return self._number_jaxpr(traced.jaxpr, consts)

    def _number_jaxpr(self, jaxpr: Jaxpr, consts: list[int]) -> list[int]:
        known: dict[Any, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        inputs = self.number_each("input", len(jaxpr.invars))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            operands = [self._operand(v, known) for v in equation.invars]
            results = self.number_results(jaxpr, equation, operands)
            if has_effects(equation) or references(equation):
                place = self.number_object(equation)
                results = self.number_each(place, len(results))
            known.update(zip(equation.outvars, results, strict=True))
        return [self._operand(v, known) for v in jaxpr.outvars]

    def number_results(
        self, jaxpr: Jaxpr, equation: JaxprEqn, operands: Sequence[Hashable]
    ) -> list[Any]:
        """Returns the numbers of an equation's results.

        Args:
          jaxpr: The program with the equation.
          equation: The equation.
          operands: The numbers of its operands, or other keys.
        """
        described = self._describe(jaxpr, equation)
        key = equation.primitive.name, tuple(operands), described
        return self.number_each(key, len(equation.outvars))

    def _describe(self, jaxpr: Jaxpr, equation: JaxprEqn) -> Hashable:
        """Returns a key for an equation's parameters and its custom rules."""
        name = equation.primitive.name
        if self._trace_rule is None or name not in _HAVE_RULES:
            return self.describe(equation.params)
        callers, self._callers = self._callers, None
        try:
            # The rules of functions that it calls are replaced by its own.
            params = equation.params.items()
            own = self.describe({n: p for n, p in params if n not in _RULES})
            if callers is None or callers.count(own) > 1:
                # The rule of a function may call this function.
                return own
            if callers and name == "shard_map":
                # Its rules cannot be traced alone, since they may use its axes.
                return own
            place = self.number_object(equation)
            inner = (equation, *equations_in(equation))
            is_partial = any(e.params.get("symbolic_zeros") for e in inner)
            if is_partial or len(callers) == _MAX_DEPTH:
                # A partial rule depends on which operands are differentiated.
                return place
            if (place, callers) not in self._rules:
                self._callers = (*callers, own)
                rule = self._trace_rule(jaxpr, equation)
                found = (own, *self.number_outputs(rule))
                self._rules[place, callers] = found
            return self._rules[place, callers]
        finally:
            self._callers = callers

    def _operand(self, operand: Any, known: Mapping[Any, int]) -> int:
        if isinstance(operand, Literal):
            return self.number_literal(operand)
        return known[operand]

    def number_literal(self, literal: Literal) -> int:
        """Returns the number of a literal."""
        try:
            content = np.asarray(literal.val).tobytes()
        except TypeError:
            return self.number_object(literal.val)
        return self.number(("literal", str(literal.aval), content))

    def describe(self, value: Any) -> Hashable:
        """Returns a hashable key for an equation's parameters, or for one."""
        if isinstance(value, ClosedJaxpr):
            return ("program", *self.number_outputs(value))
        if isinstance(value, Jaxpr):
            consts = self.number_each("const", len(value.constvars))
            return ("program", *self._number_jaxpr(value, consts))
        if isinstance(value, Mapping):
            items = [(k, self.describe(v)) for k, v in value.items()]
            return ("mapping", *sorted(items, key=lambda item: str(item[0])))
        if type(value) in (tuple, list):
            return ("sequence", *map(self.describe, value))
        if isinstance(value, float | complex):
            # The key contains the `repr`, because 0.0 and -0.0 compare equal
            # but are different values.
            return (type(value), repr(value))
        try:
            hash(value)
        except TypeError:
            return self.number_object(value)
        self._held.append(value)
        return (type(value), value)

    def number_object(self, value: object) -> int:
        """Returns the number of an object, which equals only itself."""
        self._held.append(value)
        return self.number(("object", id(value)))

    def number_each(self, key: Hashable, count: int) -> list[Any]:
        """Returns the numbers of several values that have one key."""
        return [self.number((key, i)) for i in range(count)]

    def number(self, key: Hashable) -> int:
        """Returns the number of a key."""
        return self._numbers.setdefault(key, len(self._numbers))


def compute_same(traces: Iterable[ClosedJaxpr]) -> bool:
    """Returns whether traced functions compute the same results and gradients.

    Their operations and constants are compared. These determine the gradients,
    except where a function defines a derivative of its own (`jax.custom_vjp`);
    such derivatives are traced and compared, too. Values of an outer trace that
    the functions read must be the same objects.

    Args:
      traces: The traces of the functions for the same arguments. Those after
        the first that differs are not read.

    Raises:
      Exception: if a derivative of a function's own cannot be traced.
    """
    # Constants by their contents: equal ones are represented by one of them.
    known: dict[Any, Any] = {}

    def with_known(traced: ClosedJaxpr) -> ClosedJaxpr:
        consts = [known.setdefault(_const_key(c), c) for c in traced.consts]
        return traced.replace(consts=consts)

    numbers = ValueNumbers(
        lambda jaxpr, equation: with_known(_trace_rule(jaxpr, equation))
    )
    found = (numbers.number_outputs(with_known(traced)) for traced in traces)
    first = next(found, None)
    return all(outputs == first for outputs in found)


def is_inexact(array: Array) -> bool:
    """Returns whether an array consists of real or complex floats."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _trace_rule(jaxpr: Jaxpr, equation: JaxprEqn) -> ClosedJaxpr:
    """Traces one equation of a jaxpr with its backward pass."""
    read = list(dict.fromkeys(variables(equation.invars)))
    written = [v for v in equation.outvars if not isinstance(v, DropVar)]

    def forward(*values: Array) -> list[Any]:
        of = dict(zip(read, values, strict=True))
        return compute_equations(jaxpr, [equation], written, of.__getitem__)

    def compute_both(*values: Array) -> Any:
        results, pull_back = jax.vjp(forward, *values)
        cotangents = [
            r if is_inexact(r) else np.zeros(r.shape, jax.dtypes.float0)
            for r in results
        ]
        gradients = filter(is_inexact, pull_back(cotangents))
        return results, list(gradients)

    return jax.make_jaxpr(compute_both)(*(get_shape(v.aval) for v in read))


def _const_key(const: Any) -> Any:
    """Returns a key that is equal for constants that are equal bit for bit."""
    if isinstance(const, Tracer):
        return id(const)
    array = np.asarray(const)
    return array.shape, array.dtype, array.tobytes()
