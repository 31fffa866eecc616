"""Decides whether what a traced step computes is what one device computes.

If a loss is a mean over rows, plus terms that do not depend on the rows, then
the mean of the replicas' losses equals the loss of the global batch. The same
holds for gradients. The traced step is interpreted with kinds of values (see
`kinds`) instead of arrays, by the rules in `rules`. Primitives without a rule
are assumed to mix rows, so a loss that passes the check is certainly a mean. A
value that depends on the number of rows is recognized only by comparison with a
second trace that has another number of rows.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from keras_strategies._types import Equation
from keras_strategies.passes import stages, traces
from keras_strategies.passes.row_kinds import marks, scales
from keras_strategies.passes.row_kinds.call import Different
from keras_strategies.passes.row_kinds.interpreter import Interpreter
from keras_strategies.passes.row_kinds.kinds import (
    MEAN_POWER,
    PLAIN,
    Kind,
    is_constant,
    make_rows,
)


class Verdict(enum.IntEnum):
    """Whether the mean of the replicas' losses is the global batch's loss."""

    MEAN = 0
    UNSURE = 1
    MIXED = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on a step's losses.

    Attributes:
      verdict: The worst verdict over all marked losses. `UNSURE` means that a
        trace with another number of rows is needed.
      why: The equation that mixes rows, if the verdict is `MIXED` and there is
        such an equation.
      counting: If the step computes a gradient, an update or a log with the
        number of rows: an equation that does so, or True.
      unshown: For each value that is not shown to be that of one device after
        its merge: its mark, the equation that is the cause, and whether it is
        surely another value, or computed from a derivative of user code.
      logs: The equations of logs that are not shown to be means.
      has_losses: Whether any loss is marked.
      has_user_code: Whether user code computes, or chooses, a part of the step.
      is_final: Whether traces with other numbers of rows would show no more.
    """

    verdict: Verdict
    why: Any = None
    counting: Any = None
    unshown: Sequence[tuple[str, Equation, bool]] = ()
    logs: Sequence[Equation] = ()
    has_losses: bool = False
    has_user_code: bool = False
    is_final: bool = False


def examine(
    traced: ClosedJaxpr,
    data: Sequence[int],
    num_rows: int,
    functions: Sequence[Callable[..., Any]],
) -> Finding:
    """Decides, as far as one trace shows it, what a step computes.

    Args:
      traced: See `losses_in`.
      data: See `losses_in`.
      num_rows: See `losses_in`.
      functions: The functions that may be user code: the model's step, and the
        calls of its layers.
    """
    finding = Finding(verdict=Verdict.UNSURE)
    if not has_user_code(traced, marks.LOSS):
        finding = losses_in(traced, data, num_rows)
    is_user_code = any(map(traces.is_user_function, functions))
    is_user_code = is_user_code or traces.has_user_calls(traced)
    # Keras may call a user's function, such as an activation.
    is_user_code = is_user_code or marks.has_derivatives(traced)
    is_mixed = num_rows > 1 and finding.verdict is Verdict.MIXED
    is_mean = finding.verdict is Verdict.MEAN
    return dataclasses.replace(
        finding,
        has_user_code=is_user_code,
        is_final=is_mixed or (is_mean and not is_user_code),
    )


def has_unsure_collectives(traced: ClosedJaxpr) -> bool:
    """Returns whether collectives may run on only some of the replicas.

    These are collectives in branches or `while` loops. Functions given to
    `sum_if` run on all replicas, unless it is itself in a branch.
    """
    return any(
        stages.is_collective(inner)
        for equation in stages.all_equations(
            traced, lambda e: e.params.get("name") == stages.SUM_IF
        )
        if equation.primitive.name in ("cond", "while")
        for inner in stages.equations_in(equation)
    )


def compare(
    jaxprs: Sequence[ClosedJaxpr],
    data: Sequence[int],
    num_rows: int,
    *,
    is_user_step: bool,
) -> Finding:
    """Decides from traces with several numbers of rows what a step computes.

    Args:
      jaxprs: Two traces; before them, a trace with one row if the step has one.
      data: See `losses_in`.
      num_rows: The number of rows of the first of the two traces.
      is_user_step: Whether the user wrote the model's step.
    """
    *one, first, more = jaxprs
    finding = losses_in(first, data, num_rows, more)
    if not is_user_step:
        # Gradients of losses that are means are means, unless user code
        # computes a derivative.
        gradients = (marks.GRADIENT, marks.SHARE)
        unshown = [u for u in finding.unshown if u[2] or u[0] not in gradients]
        finding = dataclasses.replace(finding, unshown=unshown)
    if not one:
        return finding
    agree = functools.partial(_agrees_with_one_row, *one, first, more)
    if has_user_code(first, marks.LOSS) and not agree(marks.LOSS):
        return Finding(verdict=Verdict.MIXED, counting=True)
    if is_user_step and not agree(*marks.USED):
        return dataclasses.replace(finding, counting=True)
    return finding


def losses_in(
    traced: ClosedJaxpr,
    data: Sequence[int],
    num_rows: int,
    retraced: ClosedJaxpr | None = None,
) -> Finding:
    """Decides whether the losses marked in a trace are means over the rows.

    Args:
      traced: The closed jaxpr of a step.
      data: The positions of those inputs whose dimension 0 is the rows.
      num_rows: The number of rows.
      retraced: A trace of the same step with more rows. Without it, the verdict
        is `UNSURE` if there is a constant that may depend on the number of
        rows, and uses of this number elsewhere are not found.
    """
    jaxprs = [traced] if retraced is None else [traced, retraced]
    count = len(traced.in_avals)
    inputs = [make_rows(0) if k in data else PLAIN for k in range(count)]
    ratio = 1.0
    if retraced is not None and data:
        ratio = retraced.jaxpr.invars[data[0]].aval.shape[0] / num_rows
    interpreter = Interpreter(num_rows, ratio)
    try:
        outputs = interpreter.interpret(jaxprs, inputs)
    except Different:
        return Finding(verdict=Verdict.MIXED, counting=True)
    found = [(_verdict(kind), kind.why) for kind in interpreter.losses]
    verdict, why = max(
        found, key=operator.itemgetter(0), default=(Verdict.MEAN, None)
    )
    finding = Finding(verdict=verdict, why=why, has_losses=bool(found))
    if retraced is None:
        return finding
    # A metric that receives gathered rows adds their number to its state.
    numbers = [kind for kind in outputs if kind.values is not None]
    is_counted = any(map(scales.depends_on_count, numbers))
    return dataclasses.replace(
        finding,
        counting=next(iter(interpreter.counting), is_counted or None),
        unshown=interpreter.unshown,
        logs=interpreter.logs,
    )


def _verdict(kind: Kind) -> Verdict:
    if kind.is_const:
        return Verdict.MEAN if is_constant(kind) else Verdict.MIXED
    if kind.is_sum and kind.power is None:
        return Verdict.UNSURE
    is_mean = kind.is_sum and kind.power == MEAN_POWER
    return Verdict.MEAN if is_mean else Verdict.MIXED


def has_user_code(jaxpr: ClosedJaxpr, *names: str) -> bool:
    """Returns whether user code computes or reads a marked value.

    User code is code outside of Keras, JAX and similar libraries. An equation
    belongs to the code that called JAX, directly or through a Keras operation.
    For example, the equations of a Keras layer belong to Keras, even if a
    user-defined model called the layer.

    Args:
      jaxpr: A closed jaxpr.
      *names: The names that were passed to `checkpoint_name` to mark values.
    """
    behind = _equations_behind(jaxpr, *names)
    marked = {
        v for e in behind if marks.is_marked(e, *names) for v in e.outvars
    }
    readers = [
        equation
        for equation in jaxpr.jaxpr.eqns
        if not marked.isdisjoint(stages.variables(equation.invars))
    ]
    inner = map(stages.equations_in, behind)
    equations = itertools.chain(readers, behind, *inner)
    return any(map(traces.is_user_code, equations))


def _agrees_with_one_row(
    one: ClosedJaxpr, two: ClosedJaxpr, more: ClosedJaxpr, *names: str
) -> bool:
    """Returns whether a trace with one row agrees with traces of more rows.

    A number that equals c * rows**p in the traces `two` and `more` must equal c
    in the trace `one`.

    Args:
      one: The trace with one row.
      two: A trace with two rows.
      more: A trace with more rows.
      *names: The marks of the values that are compared.
    """
    behind = [_equations_behind(jaxpr, *names) for jaxpr in (one, two, more)]
    if _count_computations(behind[0]) != _count_computations(behind[1]):
        return False
    known, small, large = map(_list_numbers, behind)
    rows = [j.jaxpr.invars[-1].aval.shape[0] for j in (two, more)]
    for low, high in zip(small, large, strict=True):
        # A number that does not depend on the rows must be there.
        if low == high and low not in known:
            return False
        if low == high or low != low:
            continue
        power = np.log(high / low) / np.log(rows[1] / rows[0])
        if not np.isclose(known, low / rows[0] ** power, rtol=1e-4).any():
            return False
    return True


_MOVES = stages.names_in(
    "broadcast_in_dim convert_element_type copy expand_dims reduce_sum",
    "reshape squeeze transpose",
)


def _count_computations(equations: Sequence[Any]) -> dict[Any, int]:
    """Counts primitives, except those that only move or sum values.

    A jitted function is counted as one primitive with its name, because some
    functions of JAX skip operations if there is only one row.
    """
    return collections.Counter(
        (equation.primitive.name, equation.params.get("name"))
        for equation in equations
        if equation.primitive.name not in _MOVES
    )


def _list_numbers(equations: Sequence[Any]) -> list[float]:
    """Lists the real-valued literals among the operands."""
    operands = (v for equation in equations for v in equation.invars)
    literals = (v.val for v in operands if isinstance(v, Literal))
    return [float(number) for number in literals if np.isrealobj(number)]


def _equations_behind(jaxpr: ClosedJaxpr, *names: str) -> list[Any]:
    """Returns the equations that marked values depend on.

    If there are no marked values, returns all equations.
    """
    equations = stages.needed_equations(
        jaxpr.jaxpr.eqns, (), lambda e: marks.is_marked(e, *names)
    )
    return equations or list(jaxpr.jaxpr.eqns)
