"""Decides whether losses in a traced step are means over the batch's rows.

The mean of the replicas' losses, and of their gradients, is that of the global
batch where a loss is a mean over rows, plus what does not depend on them. The
traced step is interpreted with `kinds` in the place of arrays; `rules` has a
rule for each primitive. What has none mixes rows, so
a loss that passes is a mean. What is made of the number of rows shows only
beside a second trace with another number.

Code that traces a step marks values in it by name (`mark`), which costs
nothing in the compiled program.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from keras_strategies._core.jaxprs import traces
from keras_strategies._core.jaxprs.collective_cut import trace_called
from keras_strategies._core.jaxprs.stages import scan_operands
from keras_strategies._core.row_kinds.call import Call
from keras_strategies._core.row_kinds.kinds import (
    MEAN_POWER,
    PLAIN,
    Kind,
    is_constant,
    joined,
    mixed,
    of_arrays,
    rows,
    summed,
)
from keras_strategies._core.row_kinds.rules import kinds_of_results
from keras_strategies._types import Array, Equation

LOSS = "ks.loss"
"""Marks a scalar whose mean over the replicas is taken."""
VALUES = "ks.values"
"""Marks values of rows that a reduction of ours is about to reduce."""
GLOBAL = "ks.global"
"""Marks what was computed of all replicas' rows, as one device would."""
REDUCED = "ks.reduced"
"""Marks what that made of them: the mean over the replicas is the batch's."""
AVERAGED = "ks.averaged"
"""Marks the mean of them that Keras's own reduction made."""
OWN = "ks.own"
"""Marks values that are about to be normalized with a replica's statistics."""
NORMALIZED = "ks.normalized"
"""Marks what that made of them."""


class Verdict(enum.Enum):
    """Whether the mean of the replicas' losses is the global batch's."""

    MEAN = "mean"
    UNSURE = "unsure"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of a step's losses.

    Attributes:
      verdict: The worst verdict of all losses. `UNSURE`: a trace with
        another number of rows is needed.
      why: Of `MIXED`: the equation that mixes rows, if there is one.
    """

    verdict: Verdict
    why: Any = None


def mark(value: Array, name: str) -> Array:
    """Marks an array in the trace under way; see the names above.

    Returns:
      The same array.
    """
    return checkpoint_name(value, name)


def losses_in(
    traced: ClosedJaxpr,
    data: Sequence[int],
    num_rows: int,
    twin: ClosedJaxpr | None = None,
) -> Finding:
    """Decides whether the losses that are marked in a trace are means.

    Args:
      traced: The closed jaxpr of a step.
      data: The positions of its inputs that have rows, in dimension 0.
      num_rows: The number of rows.
      twin: The same with more rows. With one trace alone, a constant that
        may be made of the number of rows leaves the verdict `UNSURE`.
    """
    jaxprs = [traced] if twin is None else [traced, twin]
    inner = traced.jaxpr
    inputs = [rows(0) if k in data else PLAIN for k in range(len(inner.invars))]
    ratio = 1.0
    if twin is not None and data:
        ratio = twin.jaxpr.invars[data[0]].aval.shape[0] / num_rows
    walk = _Walk(num_rows, ratio)
    try:
        walk.closed(jaxprs, inputs)
    except _Different:
        return Finding(verdict=Verdict.MIXED)
    return walk.finding()


class _Different(Exception):
    """Raised where the traces are not of the same equations."""


class _Walk:
    """Interprets a trace, or two of the same equations.

    Args:
      num_rows: The number of rows in the first.
      ratio: How many times these rows the second has.
    """

    def __init__(self, num_rows: int, ratio: float) -> None:
        self._num_rows = num_rows
        self._ratio = ratio
        self._losses: list[Kind] = []
        self._is_noting = True
        self._marked: dict[str, Kind] = {}

    def finding(self) -> Finding:
        """What was found of the marked losses."""
        worst = Finding(verdict=Verdict.MEAN)
        for kind in self._losses:
            verdict = _verdict(kind)
            if verdict is Verdict.MIXED:
                return Finding(verdict=verdict, why=kind.why)
            if verdict is Verdict.UNSURE:
                worst = Finding(verdict=verdict)
        return worst

    def closed(self, jaxprs: list[Any], inputs: list[Kind]) -> list[Kind]:
        """The kinds of the results of closed jaxprs."""
        return self._called([(j.jaxpr, j.consts) for j in jaxprs], inputs)

    def _called(self, called: Sequence[Any], inputs: list[Kind]) -> list[Kind]:
        """The kinds of the results of jaxprs and their constants."""
        jaxprs = [jaxpr for jaxpr, _ in called]
        columns = zip(*(consts for _, consts in called), strict=True)
        consts = map(of_arrays, columns)
        first = jaxprs[0]
        # Whether entries are placed elsewhere depends on what JAX has cached.
        parts = [_without_placing(jaxpr) for jaxpr in jaxprs]
        if len({len(equations) for equations, _ in parts}) > 1:
            raise _Different
        env: dict[Any, Kind] = dict(zip(first.constvars, consts, strict=True))
        env |= dict(zip(first.invars, inputs, strict=True))

        def read(*variables: Any) -> Kind:
            variables = tuple(
                v if isinstance(v, Literal) else same.get(v, v)
                for v, (_, same) in zip(variables, parts, strict=True)
            )
            if isinstance(variables[0], Literal):
                if not all(isinstance(v, Literal) for v in variables):
                    raise _Different
                return of_arrays([v.val for v in variables])
            return env[variables[0]]

        for equations in zip(*(found for found, _ in parts), strict=True):
            if len({e.primitive.name for e in equations}) > 1:
                raise _Different
            operands = zip(*(e.invars for e in equations), strict=True)
            kinds = [read(*pair) for pair in operands]
            found = self._results(list(equations), kinds)
            env |= dict(zip(equations[0].outvars, found, strict=True))
        outputs = zip(*(j.outvars for j in jaxprs), strict=True)
        return [read(*pair) for pair in outputs]

    def _results(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        found = self._kinds_of(equations, kinds)
        if not any(kind.of_loss for kind in kinds):
            return found
        found = [kind.but(of_loss=True) for kind in found]
        if self._is_noting and traces.is_own(equations[0]):
            # What a train step makes of a loss is one, too.
            outputs = zip(equations[0].outvars, found, strict=True)
            self._losses += [kind for v, kind in outputs if _is_number(v)]
        return found

    def _kinds_of(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        equation = equations[0]
        name = equation.primitive.name
        if name == "name":
            return [self._marked_value(equation, kinds[0])]
        if name == "scan":
            return self._scan(equations, kinds)
        if name == "while":
            return self._while(equations, kinds)
        if name == "cond":
            return self._cond(equations, kinds)
        inner = [trace_called(e) for e in equations]
        if None not in inner:
            return self._called(inner, kinds)
        call = Call(
            equation=equation,
            twin=equations[-1] if len(equations) > 1 else None,
            kinds=kinds,
            num_rows=self._num_rows,
            ratio=self._ratio,
        )
        return kinds_of_results(call)

    def _marked_value(self, equation: Equation, kind: Kind) -> Kind:
        name = equation.params["name"]
        if (
            name == LOSS
            and self._is_noting
            and not equation.outvars[0].aval.shape
        ):
            self._losses.append(kind)
            return kind.but(of_loss=True)
        if name == GLOBAL and kind.is_global:
            # From here on the number of rows is a replica's.
            return kind.but(is_global=False)
        if name in (VALUES, OWN):
            self._marked[name] = kind
        elif name in (REDUCED, AVERAGED):
            values = self._marked.get(VALUES, kind)
            if values.is_rows:
                power = values.power
                return summed(None if power is None else power + MEAN_POWER)
            return kind if name == AVERAGED else mixed(equation)
        elif name == NORMALIZED and equation.outvars[0].aval.shape:
            of = self._marked.get(OWN, kind)
            if of.is_rows:
                return rows(of.axis, of.outer)
            return of if of.is_mixed else rows(0)
        return kind

    @contextlib.contextmanager
    def _not_noting(self) -> Iterator[None]:
        before, self._is_noting = self._is_noting, False
        try:
            yield
        finally:
            self._is_noting = before

    def _settled(
        self,
        carry: list[Kind],
        body: Callable[[list[Kind]], list[Kind]],
        why: JaxprEqn,
    ) -> list[Kind]:
        """The kinds of a loop's carry, whatever the number of turns."""
        with self._not_noting():
            # A kind changes a few times at most: const, rows or sum, mixed.
            for _ in range(2 + 2 * len(carry)):
                after = body(carry)
                new = _joined_each(carry, after, why)
                if new == carry:
                    return carry
                carry = new
        return [mixed(why)] * len(carry)

    def _scan(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        equation = equations[0]
        if len({e.params["length"] for e in equations}) > 1:
            return [mixed(equation)] * len(equation.outvars)
        jaxprs = [e.params["jaxpr"] for e in equations]
        consts, carry, given = scan_operands(equation, kinds)
        num_carry = len(carry)
        slices = [_slice_of(kind, equation) for kind in given]

        def body(carry: list[Kind]) -> list[Kind]:
            return self.closed(jaxprs, [*consts, *carry, *slices])[:num_carry]

        carry = self._settled(carry, body, equation)
        found = self.closed(jaxprs, [*consts, *carry, *slices])
        return [*carry, *map(_stacked, found[num_carry:])]

    def _while(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        params = equations[0].params
        split = params["cond_nconsts"]
        start = split + params["body_nconsts"]
        of_cond, of_body = kinds[:split], kinds[split:start]
        carry = kinds[start:]
        tests = [e.params["cond_jaxpr"] for e in equations]
        bodies = [e.params["body_jaxpr"] for e in equations]
        carry = self._settled(
            carry,
            lambda carry: self.closed(bodies, [*of_body, *carry]),
            equations[0],
        )
        (test,) = self.closed(tests, [*of_cond, *carry])
        if not test.is_const or not is_constant(test):
            return [mixed(equations[0])] * len(carry)
        self.closed(bodies, [*of_body, *carry])
        return carry

    def _cond(self, equations: list[Any], kinds: list[Kind]) -> list[Kind]:
        which, *operands = kinds
        columns = zip(*(e.params["branches"] for e in equations), strict=True)
        branches = [self.closed(list(pair), operands) for pair in columns]
        if not which.is_const or not is_constant(which):
            return [mixed(equations[0])] * len(branches[0])
        found = branches[0]
        for other in branches[1:]:
            found = _joined_each(found, other, equations[0])
        return found


def _joined_each(
    ones: list[Kind], others: list[Kind], why: Equation
) -> list[Kind]:
    """Returns the kinds of an equation's first results, which are either."""
    shapes = [variable.aval.shape for variable in why.outvars[: len(ones)]]
    columns = zip(ones, others, shapes, strict=True)
    return [joined(one, two, shape, why) for one, two, shape in columns]


def _is_number(variable: Any) -> bool:
    aval = variable.aval
    return not aval.shape and jnp.issubdtype(aval.dtype, jnp.floating)


def _without_placing(jaxpr: Jaxpr) -> tuple[list[Any], dict[Any, Any]]:
    """A jaxpr's other equations, and what their operands are otherwise."""
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


def _verdict(kind: Kind) -> Verdict:
    if kind.is_const:
        return Verdict.MEAN if is_constant(kind) else Verdict.MIXED
    if kind.is_sum and kind.power is None:
        return Verdict.UNSURE
    is_mean = kind.is_sum and kind.power == MEAN_POWER
    return Verdict.MEAN if is_mean else Verdict.MIXED


def _slice_of(kind: Kind, why: JaxprEqn) -> Kind:
    """The kind of the entries along dimension 0."""
    if kind.is_rows:
        if kind.axis == 0:
            return mixed(why)
        return kind.but(axis=kind.axis - 1, columns=frozenset())
    blocks = {axis - 1: s for axis, s in kind.blocks.items() if axis}
    index_of = kind.index_of - 1 if kind.index_of else None
    return kind.but(blocks=blocks, index_of=index_of)


def _stacked(kind: Kind) -> Kind:
    """The kind of values of several turns, in a new dimension 0."""
    if kind.is_rows:
        return kind.but(axis=kind.axis + 1, columns=frozenset())
    blocks = {axis + 1: size for axis, size in kind.blocks.items()}
    index_of = None if kind.index_of is None else kind.index_of + 1
    return kind.but(blocks=blocks, index_of=index_of, values=None)
