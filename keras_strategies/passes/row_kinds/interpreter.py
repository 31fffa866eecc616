"""An interpreter of traces that finds how each value depends on the rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from keras_strategies._types import Equation
from keras_strategies.passes import traces
from keras_strategies.passes.collective_cut import find_called_jaxpr
from keras_strategies.passes.row_kinds import marks, scales
from keras_strategies.passes.row_kinds.call import Call, Different
from keras_strategies.passes.row_kinds.inner_functions import (
    kinds_of_update,
    map_over_rows,
)
from keras_strategies.passes.row_kinds.kernels import is_by_rows
from keras_strategies.passes.row_kinds.kinds import (
    MEAN_POWER,
    PLAIN,
    Kind,
    is_constant,
    join_each,
    kind_of_arrays,
    make_mixed,
    make_rows,
    make_sum,
    make_uniform,
    slice_kind,
    stack,
)
from keras_strategies.passes.row_kinds.rules import kinds_of_results
from keras_strategies.passes.row_kinds.separate_parts import (
    SeparateParts,
    has_other_code,
    is_part,
    part_p,
)
from keras_strategies.passes.stages import is_collective, scan_operands


class Interpreter:
    """An interpreter that finds the `Kind` of each value in one or two traces.

    Args:
      num_rows: The number of rows of the batch in the first trace.
      ratio: The number of rows of the second trace, divided by `num_rows`.

    Attributes:
      losses: The kinds of the marked losses.
      counting, unshown, logs: See `losses.Finding`, for each value.
    """

    def __init__(self, num_rows: int, ratio: float) -> None:
        self._num_rows = num_rows
        self._ratio = ratio
        self.unshown: list[tuple[str, Equation, bool]] = []
        self.logs: list[Equation] = []
        # The last number in user code that is differentiated and no mean.
        self._differentiated: Equation | None = None
        self.losses: list[Kind] = []
        self.counting: list[Equation] = []
        self._calls: list[Equation] = []
        self._is_noting = True
        self._marked: dict[str, Kind] = {}
        self._parts = SeparateParts()

    def interpret(self, traced: list[Any], inputs: list[Kind]) -> list[Kind]:
        """Returns the `Kind` of each result of a function, given its traces."""
        jaxprs = [each.jaxpr for each in traced]
        consts = map(kind_of_arrays, _pair([each.consts for each in traced]))
        first = jaxprs[0]
        # Two traces may differ in equations that only change a sharding,
        # because these equations depend on JAX's caches.
        parts = [_without_placing(jaxpr) for jaxpr in jaxprs]
        env: dict[Any, Kind] = dict(zip(first.constvars, consts, strict=True))
        env |= dict(zip(first.invars, inputs, strict=True))

        def read(*variables: Any) -> Kind:
            variables = tuple(
                v if isinstance(v, Literal) else same.get(v, v)
                for v, (_, same) in zip(variables, parts, strict=True)
            )
            if isinstance(variables[0], Literal):
                if not all(isinstance(v, Literal) for v in variables):
                    raise Different
                return kind_of_arrays([v.val for v in variables])
            return env[variables[0]]

        for equations in _pair([equations for equations, _ in parts]):
            if len({e.primitive.name for e in equations}) > 1:
                raise Different
            kinds = [read(*k) for k in _pair([e.invars for e in equations])]
            results = self._results(list(equations), kinds)
            env |= dict(zip(equations[0].outvars, results, strict=True))
        return [read(*k) for k in _pair([j.outvars for j in jaxprs])]

    def _results(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        self._calls.append(equations[0])
        results = self._find_kinds(equations, kinds)
        if self._is_noting:
            self._note_differentiated(equations[0], results)
        if len(equations) > 1:
            if self._is_noting and scales.updates_by_count(self._calls, kinds):
                self.counting.append(equations[0])
            results = [scales.with_term(kind, kinds) for kind in results]
        self._calls.pop()
        if not any(kind.from_loss for kind in kinds):
            return results
        is_sum = equations[0].primitive.name.startswith("psum")
        if is_sum and is_collective(equations[0]):
            # A sum over the replicas is that of one device. So what the step
            # computes from it, such as a metric's result, is not a loss.
            return [kind.but(from_loss=False) for kind in results]
        results = [kind.but(from_loss=True) for kind in results]
        if self._is_noting and traces.is_user_code(equations[0]):
            # A scalar that a train step computes from a loss is itself a loss.
            outputs = zip(equations[0].outvars, results, strict=True)
            self.losses += [kind for v, kind in outputs if _is_number(v)]
        return results

    def _note_differentiated(
        self, equation: Equation, results: list[Kind]
    ) -> None:
        is_number = _is_number(equation.outvars[0]) if results else False
        if not is_number or scales.is_shown(results[0], marks.LOG):
            return
        names = str(equation.source_info.name_stack)
        is_forward = "jvp(" in names and "transpose(" not in names
        if is_forward and traces.is_user_code(equation):
            self._differentiated = results[0].why or equation

    def _find_kinds(
        self, equations: list[Any], kinds: list[Kind]
    ) -> list[Kind]:
        equation = equations[0]
        name = equation.primitive.name
        if name == "name":
            return [self._marked_value(equation, kinds[0])]
        if name == marks.mark_p.name:
            return [self._marked_both_ways(equations, kinds[0])]
        call = Call(
            equation=equation,
            retraced=equations[-1] if len(equations) > 1 else None,
            kinds=kinds,
            num_rows=self._num_rows,
            ratio=self._ratio,
        )
        if name == part_p.name:
            return [self._parts.find_kind(call)]
        if name == "scan":
            return self._scan(equations, kinds)
        if name == "while":
            return self._while(equations, kinds)
        if name == "cond":
            return self._cond(equations, kinds)
        if name == "custom_linear_solve":
            return self._solve(equations, kinds)
        inner = [find_called_jaxpr(e) for e in equations]
        if has_other_code(equations):
            return [make_mixed(equation)] * len(equation.outvars)
        if None not in inner and not is_by_rows(equation):
            called = [ClosedJaxpr(*pair) for pair in inner if pair]
            updated = kinds_of_update(equations, kinds)
            results = updated or self.interpret(called, kinds)
            return [_with_place(kind, equation) for kind in results]
        return kinds_of_results(call)

    def _marked_value(self, equation: Equation, kind: Kind) -> Kind:
        name = equation.params["name"]
        is_scalar = not equation.outvars[0].aval.shape
        if name == marks.LOSS and self._is_noting and is_scalar:
            self.losses.append(kind)
            return kind.but(from_loss=True)
        if name in (*marks.USED, marks.CHANGE):
            self._check_merge(equation, name, kind)
        is_gradient = name in (marks.GRADIENT, marks.SHARE)
        is_shown = scales.is_shown(kind, name, self._ratio)
        if is_gradient and not kind.is_zero and is_shown:
            # The replicas merge all of them in the same way.
            return make_sum(MEAN_POWER)
        if name == marks.CHANGE and not scales.is_wrong(kind, name):
            # The replicas sum it up, as one device does.
            return PLAIN.but(is_global=True)
        if name == marks.GLOBAL and kind.is_global:
            # Later computations with this value run on each replica, so a
            # number of rows in them is that of the replica.
            return kind.but(is_global=False, is_gathered=False)
        if name in (marks.VALUES, marks.OWN):
            self._marked[name] = kind
        elif name in (marks.REDUCED, marks.AVERAGED):
            values = self._marked.get(marks.VALUES, kind)
            if values.is_rows:
                power = values.power
                return make_sum(None if power is None else power + MEAN_POWER)
            return kind if name == marks.AVERAGED else make_mixed(equation)
        elif name == marks.NORMALIZED and not is_scalar:
            of = self._marked.get(marks.OWN, kind)
            if of.is_rows:
                return make_rows(of.axis, of.outer)
            return of if of.is_mixed else make_rows(0)
        return kind

    def _marked_both_ways(self, equations: list[Any], kind: Kind) -> Kind:
        equation, params = equations[0], equations[0].params
        name, shape = params["name"], equation.outvars[0].aval.shape
        zero = make_uniform((0,) * len(equations), shape)
        if name == marks.STATISTIC:
            return zero if params["is_cotangent"] else PLAIN
        if name == marks.DERIVATIVE and params["is_cotangent"]:
            is_believed = any(map(is_part, self._calls))
            if self._is_noting and kind.is_mixed and not is_believed:
                self.unshown.append((marks.GRADIENT, kind.why, True))
            return kind
        if not params["is_cotangent"]:
            if name == marks.VALUES:
                self._marked[str(shape)] = kind
            return kind
        if name == marks.REDUCED:
            self._marked["cotangent"] = kind
            return kind
        # The derivatives of values that are reduced over all replicas.
        of, by = self._marked[str(shape)], self._marked["cotangent"]
        if by.is_zero:
            return zero
        if kind.is_mixed or not of.is_rows or not by.is_const:
            return make_mixed(equation)
        power = by.power_in(self._ratio)
        power = None if power is None else power + MEAN_POWER
        return make_rows(of.axis, of.outer, power)

    def _check_merge(self, equation: Equation, name: str, kind: Kind) -> None:
        """Notes what is wrong with a value that the replicas merge."""
        why = kind.why or equation
        if name in (marks.LOG, marks.CHANGE):
            if scales.is_wrong(kind, name):
                self.counting.append(why)
            elif name == marks.LOG and not scales.is_shown(kind, name):
                self.logs.append(why)
        elif not scales.is_shown(kind, name, self._ratio):
            # Otherwise the cause may be an operation without a rule.
            is_known = kind.why is None and kind.power is not None
            if name in (marks.GRADIENT, marks.SHARE):
                why = self._differentiated or why
            self.unshown.append((name, why, is_known))

    def _find_fixed_point(
        self,
        carry: list[Kind],
        body: Callable[[list[Kind]], list[Kind]],
        why: JaxprEqn,
    ) -> list[Kind]:
        """Returns kinds of a loop's carry that are valid in all iterations."""
        before, self._is_noting = self._is_noting, False
        try:
            # A kind changes only a few times: from `CONST` to `ROWS` or `SUM`,
            # and then to `MIXED`.
            for _ in range(2 + 2 * len(carry)):
                after = body(carry)[: len(carry)]
                new = join_each(carry, after, why)
                if new == carry:
                    return carry
                carry = new
        finally:
            self._is_noting = before
        return [make_mixed(why)] * len(carry)

    def _scan(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        equation = equations[0]
        mapped = map_over_rows(equations, kinds)
        if mapped is not None:
            return self.interpret(mapped, kinds)
        if len({e.params["length"] for e in equations}) > 1:
            return [make_mixed(equation)] * len(equation.outvars)
        jaxprs = [e.params["jaxpr"] for e in equations]
        consts, carry, scanned = scan_operands(equation, kinds)
        slices = [slice_kind(kind, equation) for kind in scanned]

        def body(carry: list[Kind]) -> list[Kind]:
            return self.interpret(jaxprs, [*consts, *carry, *slices])

        carry = self._find_fixed_point(carry, body, equation)
        return [*carry, *map(stack, body(carry)[len(carry) :])]

    def _while(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        params = equations[0].params
        split = params["cond_nconsts"]
        start = split + params["body_nconsts"]
        tests = [e.params["cond_jaxpr"] for e in equations]
        bodies = [e.params["body_jaxpr"] for e in equations]

        def body(carry: list[Kind]) -> list[Kind]:
            return self.interpret(bodies, [*kinds[split:start], *carry])

        carry = self._find_fixed_point(kinds[start:], body, equations[0])
        (test,) = self.interpret(tests, [*kinds[:split], *carry])
        if not test.is_const or not is_constant(test):
            return [make_mixed(equations[0])] * len(carry)
        # The body is interpreted once more with the final kinds, to record the
        # losses inside it.
        body(carry)
        return carry

    def _cond(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        which, *operands = kinds
        pairs = _pair([e.params["branches"] for e in equations])
        branches = [self.interpret(list(pair), operands) for pair in pairs]
        if not which.is_const or not is_constant(which):
            return [make_mixed(equations[0])] * len(branches[0])
        join_two = functools.partial(join_each, why=equations[0])
        return functools.reduce(join_two, branches)

    def _solve(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        """Interprets the solver of a `custom_linear_solve`.

        The other functions are only differentiated.
        """
        lengths = equations[0].params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        operands = kinds[start : start + lengths.solve] + kinds[sum(lengths) :]
        solvers = [equation.params["jaxprs"].solve for equation in equations]
        return self.interpret(solvers, operands)


def _pair(lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Returns the entries at each place of lists of the two traces."""
    if len({len(entries) for entries in lists}) > 1:
        raise Different
    return list(zip(*lists, strict=True))


def _with_place(kind: Kind, call: Equation) -> Kind:
    """Returns a kind whose `why` has a place: that of a call if need be."""
    is_placed = not kind.is_mixed or traces.find_place(kind.why)
    return kind if is_placed else kind.but(why=call)


def _is_number(variable: Any) -> bool:
    aval = variable.aval
    return not aval.shape and jnp.issubdtype(aval.dtype, jnp.floating)


def _without_placing(jaxpr: Jaxpr) -> tuple[list[Any], dict[Any, Any]]:
    """Removes the equations of a jaxpr that only change a sharding.

    Returns:
      The other equations, and a dict from the result of each removed equation
      to its operand.
    """
    equations, same = [], {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("reshard", "sharding_constraint"):
            (operand,) = equation.invars
            if not isinstance(operand, Literal):
                operand = same.get(operand, operand)
            same[equation.outvars[0]] = operand
        else:
            equations.append(equation)
    return equations, same
