"""Decides from traces of a step what depends on the rows of its batch."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from keras_strategies.passes import traces
from keras_strategies.passes.row_kinds import losses, marks
from keras_strategies.passes.row_kinds.losses import Finding, Verdict
from keras_strategies.passes.stages import (
    all_equations,
    needed_equations,
    variables,
)
from keras_strategies.step.record import Record
from keras_strategies.tpu.chips import find_chip

Retrace = Callable[..., Record]
"""A function that traces the step again, with the number of rows of the global
batch, or with another number that is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of the analysis of a step's traces.

    Attributes:
      reason: Why the step must run over the global batch, as text for a
        warning; None if it can be mapped over the replicas.
      logs: The equations of logs that are not shown to be means.
    """

    reason: str | None = None
    logs: Sequence[JaxprEqn] = ()


def analyze(
    record: Record, retrace: Retrace, step: Callable[..., Any]
) -> Analysis:
    """Decides whether a train or test step can be mapped over the replicas.

    If one trace is not sufficient, the step is traced again with the global
    number of rows. The comparison of the traces shows what depends on the
    number of rows: constants, shapes, and user code that treats some numbers of
    rows differently.

    Args:
      record: The record of the step.
      retrace: Traces the step with other numbers of rows.
      step: The model's step.
    """
    if record.reason is not None:
        return Analysis(reason=record.reason)
    # A step that uses its replica context is responsible for its collectives.
    if record.replica_uses:
        return Analysis(reason=_check_sizes(record, retrace))
    if losses.has_unsure_collectives(record.jaxpr):
        return Analysis(reason=_BRANCH_REASON)
    finding: Finding | str = losses.examine(
        record.jaxpr, _row_inputs(record), record.rows, _list_functions(step)
    )
    reason = _check_sizes(record, retrace)
    if reason is not None:
        return Analysis(reason=reason)
    if not finding.is_final:
        finding = _compare_rows(record, finding, retrace, step)
    if isinstance(finding, str):
        return Analysis(reason=finding)
    return Analysis(reason=_describe_finding(finding), logs=finding.logs[:1])


def analyze_outputs(
    record: Record,
    retrace: Retrace,
    step: Callable[..., Any],
) -> Analysis:
    """Decides whether each output of a predict step has an entry for each row.

    A dimension of an output may equal the number of rows by chance, so the step
    is traced with twice the rows, unless Keras's code computes the outputs.

    Args:
      record: The record of the step.
      retrace: Traces the step with other numbers of rows.
      step: The model's step.
    """
    records = [record]
    if not _has_known_outputs(step):
        records.append(retrace(2 * record.rows))
    for trace in records:
        if trace.error is not None:
            return Analysis(reason=describe_error(trace.error))
        if not is_by_rows(trace.traced.shapes[0], trace.rows):
            return Analysis(reason=OUTPUT_REASON)
    return Analysis(reason=record.reason)


def is_by_rows(outputs: Any, rows: int) -> bool:
    """Returns whether each array of a nest has an entry for each row."""
    return all(np.shape(o)[:1] == (rows,) for o in jax.tree.leaves(outputs))


def _has_known_outputs(step: Callable[..., Any]) -> bool:
    """Returns whether each output surely has an entry for each row."""
    model = getattr(step, "__self__", None)
    functions = (step, getattr(type(model), "call", step))
    outputs: Any = getattr(model, "outputs", None)
    return not any(map(traces.is_user_function, functions)) and bool(
        outputs and all(o.shape[:1] == (None,) for o in outputs)
    )


def _check_sizes(record: Record, retrace: Retrace) -> str | None:
    """Checks in a trace with more rows that exactly row counts grow."""
    if not record.sizes:
        return None
    more = retrace()
    if more.error is not None:
        return (
            "a user-defined step passes arrays to metrics or to losses that "
            "combine rows, and a second trace with more rows, which would "
            "show whether these arrays have an entry for each row, failed: "
            f"{describe_error(more.error)}"
        )
    ratio = more.rows / record.rows
    sizes = [size for size, _, _ in more.sizes]
    for k, (size, is_rows, of) in enumerate(record.sizes):
        if sizes[k : k + 1] != [ratio * size if is_rows else size]:
            return (
                f"{of} receives an array whose size equals the number of rows "
                "only by chance, or a number that counts the rows. Pass arrays "
                "with an entry for each row; `keras.metrics.Mean` also accepts "
                "a mean over the rows"
            )
    return None


def _describe_finding(finding: Finding) -> str | None:
    """Returns the reason why a step cannot be mapped, or None if it can."""
    if finding.verdict is not Verdict.MEAN:
        return _LOSS_REASON.format(place=_describe_place(finding.why))
    if finding.counting:
        return _COUNT_REASON.format(place=_describe_line(finding.counting))
    if not finding.unshown:
        return None
    mark, equation, _ = finding.unshown[0]
    value, fix = _UNSHOWN[mark]
    rule, merged = _SUM if mark in (marks.COUNT, marks.SHARE) else _MEAN
    return (
        f"{value} is not shown to be {rule}{_describe_place(equation)}, so "
        f"{merged} of the replicas' values may be another number. To run the "
        f"step replica by replica, {fix}"
    )


def _compare_rows(
    record: Record,
    finding: Finding,
    retrace: Retrace,
    step: Callable[..., Any],
) -> Finding | str:
    """Returns how a step depends on its rows, or an error as a reason."""
    is_mean = finding.verdict is Verdict.MEAN
    is_user_step = traces.is_user_function(step)
    # With one row, the row dimension looks like any other dimension of size
    # one, so a trace of two rows stands for a replica's.
    first = record if record.rows > 1 else retrace(2)
    more = retrace()
    problem = _find_problem(first) or _find_problem(more)
    if problem is not None:
        # The step works only with this batch's shapes.
        if not is_mean or (is_user_step and not finding.has_losses):
            return problem
        return finding
    records = [record, more] if first is record else [record, first, more]
    compared = losses.compare(
        [r.jaxpr for r in records],
        _row_inputs(first),
        first.rows,
        is_user_step=is_user_step,
    )
    if not finding.has_user_code:
        compared = Finding(verdict=compared.verdict, why=compared.why)
    if is_mean:
        return dataclasses.replace(compared, verdict=Verdict.MEAN)
    return compared


def _list_functions(step: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Lists functions that compute, or choose, the parts of a step."""
    model = getattr(step, "__self__", None)
    layers = model._flatten_layers() if isinstance(model, keras.Layer) else ()
    return [step, *(type(layer).call for layer in layers)]


def _find_problem(record: Record) -> str | None:
    """Returns the reason why a further trace cannot be compared, or None."""
    if record.error is not None:
        return describe_error(record.error)
    return record.reason


def _row_inputs(record: Record) -> range:
    """Returns the positions of a trace's inputs that have rows."""
    inputs = len(record.jaxpr.jaxpr.invars)
    return range(inputs - record.num_row_arrays, inputs)


OUTPUT_REASON = "its outputs do not have the number of rows of the batch"
"""A reason of predict steps, of which no warning is given."""

_BRANCH_REASON = (
    "gradients or metrics are reduced over the replicas inside a `cond`, "
    "`switch` or `while_loop`, which some replicas might not enter. Apply "
    "optimizers and update metrics outside of it"
)

_UNSHOWN = {
    marks.GRADIENT: (
        "a gradient that an optimizer receives",
        "differentiate means over the rows (`ops.mean`, not a sum that is "
        "divided by a constant), and let the optimizer change gradients",
    ),
    marks.SHARE: (
        "a gradient of a scaled loss",
        "scale a mean over the rows (`ops.mean`), and let the optimizer change "
        "gradients",
    ),
    marks.WEIGHT: (
        "a new value of a weight",
        "assign means over the rows (`ops.mean`)",
    ),
    marks.STATE: (
        "a new value of a variable",
        "assign means over the rows (`ops.mean`), or choose how the replicas' "
        "values are merged (`ks.merge`)",
    ),
    marks.COUNT: (
        "an integer in the logs",
        "return sums of integers over the rows, or other numbers as floats",
    ),
}
_MEAN = "a mean over the batch's rows, or independent of them", "the mean"
_SUM = "the replica's share of a sum over the batch's rows", "the sum"


class LogWarning(UserWarning):
    """A log is a mean of the replicas' values that may be no log of one device.

    If a filter of warnings turns it into an error, the step does not run.
    """


def warn_of_products(
    jaxpr: ClosedJaxpr, device: jax.Device, parts: int
) -> None:
    """Warns of a matrix product that is too large, before it is compiled.

    For example, these are scores of attention that a layer computes by itself.

    Args:
      jaxpr: The trace of a step.
      device: One of its devices.
      parts: The largest number of devices that may share the product.
    """
    chip = find_chip(device)
    if chip is None:
        return

    def count_bytes(equation: JaxprEqn) -> float:
        result: Any = equation.outvars[0].aval
        return result.size * result.dtype.itemsize / parts

    # Of `blocked_head`, the compiler removes the logits.
    live = needed_equations(jaxpr.jaxpr.eqns, variables(jaxpr.jaxpr.outvars))
    products = [
        e
        for e in all_equations(jaxpr.jaxpr.replace(eqns=live))
        if e.primitive.name == "dot_general"
    ]
    largest = max(products, key=count_bytes, default=None)
    if largest is None or count_bytes(largest) <= chip.memory_bytes:
        return
    warnings.warn(
        "A step stores a matrix product of shape "
        f"{largest.outvars[0].aval.shape}, {count_bytes(largest) / 1e9:.0f} GB "
        f"on each device ({chip.memory_bytes / 1e9:.0f} GB of memory): "
        f"{traces.find_place(largest) or 'unknown place'}. Use fewer rows or "
        "shorter sequences. If these are scores of attention, a kernel that "
        "stores none computes `keras.ops.dot_product_attention` (docs/tpu.md).",
        UserWarning,
        stacklevel=2,
    )


def warn_of_log(equation: JaxprEqn) -> None:
    """Warns that a log may be another number than that of one device."""
    warning = LogWarning(
        "A value that a step returns for the logs is not shown to be a mean "
        f"over the batch's rows{_describe_line(equation)}. The log is the mean "
        "of the replicas' values, which may be another number. To log the "
        "number of the global batch, update a metric of `keras.metrics`, and "
        "return its result."
    )
    warnings.warn(warning, stacklevel=2)


_COUNT_REASON = (
    "a gradient, an optimizer's update, the new value of a variable or a log "
    "depends on the number of rows, such as `x.shape[0]` or a sum over the "
    "rows{place}, which is different on each replica. To run the step replica "
    "by replica, use a constant instead, or a mean over the rows (`ops.mean`)"
)

_LOSS_REASON = (
    "its loss is not a mean over the batch's rows{place}, so the mean of the "
    "replicas' losses would be a different number. To run the step replica by "
    "replica, compute a loss for each row and return `ops.mean` of these, or "
    "mark the loss with `ks.global_batch_loss`, which gathers the rows"
)


def _describe_place(why: JaxprEqn | None) -> str:
    """Describes, for a message, the jaxpr equation that combines rows."""
    if why is None or why.primitive.name == "name":
        # A mark combines nothing.
        return _describe_line(why)
    place = traces.find_place(why)
    operation = f"`{why.primitive.name}` combines rows"
    return f" ({operation}{f' at {place}' if place else ''})"


def _describe_line(equation: object) -> str:
    place = traces.find_place(equation)
    return f" (at {place})" if place else ""


def warn_of_global_batch(reason: str) -> None:
    """Warns that a step is not mapped over the replicas, and why."""
    warnings.warn(
        "This step runs over the global batch instead of replica by replica, "
        f"which is exact and may be slower: {reason}.",
        UserWarning,
        stacklevel=2,
    )


def describe_error(error: Exception) -> str:
    """Describes a trace's error, as the reason why a step is not mapped."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (
        "it cannot be traced with a different number of rows "
        f"({type(error).__name__}: {lines[0] if lines else ''}). Do not fix "
        "the batch size in the model's shapes"
    )
