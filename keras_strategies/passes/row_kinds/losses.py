"""Decides whether losses in a traced step are means over the batch's rows.

If a loss is a mean over rows, plus terms that do not depend on the rows, then
the mean of the replicas' losses equals the loss of the global batch. The same
holds for gradients. The traced step is interpreted with kinds of values (see
`kinds`) instead of arrays, by the rules in `rules`. Primitives without a rule
are assumed to mix rows, so a loss that passes the check is certainly a mean. A
value that depends on the number of rows is recognized only by comparison with a
second trace that has another number of rows.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from keras_strategies._types import Equation
from keras_strategies.passes.row_kinds import scales
from keras_strategies.passes.row_kinds.interpreter import (
    Different,
    Interpreter,
)
from keras_strategies.passes.row_kinds.kinds import (
    MEAN_POWER,
    PLAIN,
    Kind,
    is_constant,
    make_rows,
)


class Verdict(enum.Enum):
    """Whether the mean of the replicas' losses is the global batch's loss."""

    MEAN = "mean"
    UNSURE = "unsure"
    MIXED = "mixed"


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
        its merge: its mark, the equation that is the cause, and whether user
        code multiplies it by a number of rows.
      logs: The equations of logs that are not shown to be means.
      has_losses: Whether any loss is marked.
    """

    verdict: Verdict
    why: Any = None
    counting: Any = None
    unshown: Sequence[tuple[str, Equation, bool]] = ()
    logs: Sequence[Equation] = ()
    has_losses: bool = False


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
    inner = traced.jaxpr
    inputs = [
        make_rows(0) if k in data else PLAIN for k in range(len(inner.invars))
    ]
    ratio = 1.0
    if retraced is not None and data:
        ratio = retraced.jaxpr.invars[data[0]].aval.shape[0] / num_rows
    interpreter = Interpreter(num_rows, ratio)
    try:
        outputs = interpreter.interpret(jaxprs, inputs)
    except Different:
        return Finding(verdict=Verdict.MIXED, counting=True)
    finding = _make_finding(interpreter)
    if retraced is None:
        return dataclasses.replace(finding, counting=None, unshown=(), logs=())
    # A metric that receives gathered rows adds their number to its state.
    numbers = [kind for kind in outputs if kind.values is not None]
    if any(map(scales.depends_on_count, numbers)):
        return dataclasses.replace(finding, counting=finding.counting or True)
    return finding


def _make_finding(interpreter: Interpreter) -> Finding:
    """Returns the verdict on the marked losses, and what else is wrong."""
    verdicts = [(_verdict(kind), kind.why) for kind in interpreter.losses]
    order = (Verdict.MIXED, Verdict.UNSURE, Verdict.MEAN)
    verdict, why = min(
        verdicts,
        key=lambda pair: order.index(pair[0]),
        default=(Verdict.MEAN, None),
    )
    return Finding(
        verdict=verdict,
        why=why,
        counting=next(iter(interpreter.counting), None),
        unshown=interpreter.unshown,
        logs=interpreter.logs,
        has_losses=bool(interpreter.losses),
    )


def _verdict(kind: Kind) -> Verdict:
    if kind.is_const:
        return Verdict.MEAN if is_constant(kind) else Verdict.MIXED
    if kind.is_sum and kind.power is None:
        return Verdict.UNSURE
    is_mean = kind.is_sum and kind.power == MEAN_POWER
    return Verdict.MEAN if is_mean else Verdict.MIXED
