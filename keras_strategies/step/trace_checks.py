"""The checks that a step's trace must pass before it is used."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge.step_context import (
    Group,
    StepContext,
    StepFacts,
)
from keras_strategies.passes import traces
from keras_strategies.passes.marked_updates import collect_updates
from keras_strategies.passes.row_kinds import losses, marks
from keras_strategies.passes.row_kinds.losses import Finding, Verdict
from keras_strategies.spmd.replica_map import has_unsure_collectives
from keras_strategies.step.traced import Traced


class StepsNotFused(Exception):
    """Raised by a trace whose steps run faster outside of a loop.

    On CPU, XLA computes gradients of convolutions up to twenty times slower
    inside a loop (jaxlib 0.10.2).
    """


def trace_and_check(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    check: Callable[[ClosedJaxpr], object] = bool,
    *,
    is_user_step: bool = False,
) -> tuple[Any, ...]:
    """Traces `body(step, *state, data)`, checks the trace and evaluates it.

    Args:
      step: The context of the step.
      body: The step.
      state: Its state.
      data: A replica's rows.
      check: A further check, which receives the trace.
      is_user_step: Whether the user wrote the model's step.

    Raises:
      GlobalBatchNeeded: if the replicas communicate in a branch or a loop that
        some of them may not enter, so that the others would wait forever; if an
        array or number has the batch's number of rows only by chance; if a
        loss is not a mean over the rows; or if a gradient, an update or a state
        depends on the number of rows.
    """
    args = (*state, data)
    traced = Traced(functools.partial(body, step), *args)
    check(traced.jaxpr)
    # A step that uses its replica context is responsible for its collectives.
    is_unaware = not step.notes.replica_uses
    if is_unaware and has_unsure_collectives(traced.jaxpr):
        step.demand_global_batch(
            "gradients or metrics are reduced over the replicas inside a "
            "`cond`, `switch` or `while_loop`, which some replicas might not "
            "enter. Apply optimizers and update metrics outside of it"
        )
    if step.notes.sizes:
        _check_sizes(step, body, state, data)
    if is_unaware and step.num_replicas > 1:
        _check_losses(step, body, state, data, traced.jaxpr, is_user_step)
    traced.combine_sums(step)
    return traced(*args)


def _check_sizes(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
) -> None:
    """Checks in a trace with twice the rows that exactly row counts double."""
    probe = step.make_probe(2 * step.facts.rows)
    try:
        probed = functools.partial(body, probe)
        eval_with_rows(probe.facts.rows, probed, state, data)
    except Exception as error:
        if traces.is_fault_of_package(error):
            raise
        step.demand_global_batch(
            "a user-defined step passes arrays to metrics or to losses that "
            "combine rows, and a second trace with twice the rows, which would "
            "show whether these arrays have an entry for each row, failed: "
            f"{describe_error(error)}"
        )
    sizes = [size for size, _, _ in probe.notes.sizes]
    for k, (size, is_rows, of) in enumerate(step.notes.sizes):
        if sizes[k : k + 1] != [2 * size if is_rows else size]:
            step.demand_global_batch(
                f"{of} receives an array whose size equals the number of rows "
                "only by chance, or a number that counts the rows. Pass arrays "
                "with an entry for each row; `keras.metrics.Mean` also accepts "
                "a mean over the rows"
            )


def _check_losses(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    jaxpr: ClosedJaxpr,
    is_user_step: bool,
) -> None:
    """Checks that the losses are means, and all else free of row counts.

    If one trace is not sufficient, the step is traced again with the global
    number of rows. The comparison of the traces shows what depends on the
    number of rows: constants, shapes, and user code that treats some numbers of
    rows differently.
    """
    finding = _compare_rows(step, body, state, data, jaxpr, is_user_step)
    if finding.verdict is not Verdict.MEAN:
        place = _describe_place(finding.why)
        step.demand_global_batch(_LOSS_REASON.format(place=place))
    if finding.counting:
        place = finding.counting is not True and traces.find_place(
            finding.counting
        )
        place = f" (at {place})" if place else ""
        step.demand_global_batch(_COUNT_REASON.format(place=place))
    if finding.unshown is not None:
        mark, equation = finding.unshown
        value, cure = _UNSHOWN[mark]
        rule, merged = _SUM if mark in (marks.COUNT, marks.SHARE) else _MEAN
        place = _describe_place(equation)
        step.demand_global_batch(
            f"{value} is not shown to be {rule}{place}, so {merged} of the "
            "replicas' values may be another number. To run the step replica "
            f"by replica, {cure}"
        )
    for equation in finding.logs[:1]:
        _warn_of_log(equation)


def _compare_rows(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    jaxpr: ClosedJaxpr,
    is_user_step: bool,
) -> Finding:
    """Returns how a step depends on its rows, from one trace or from two."""
    inputs = len(jaxpr.jaxpr.invars)
    of_rows = range(inputs - len(jax.tree.leaves(data)), inputs)
    rows = step.facts.rows
    finding = Finding(verdict=Verdict.UNSURE)
    if not traces.has_user_code(jaxpr, marks.LOSS):
        finding = losses.losses_in(jaxpr, of_rows, rows)
    is_mean = finding.verdict is Verdict.MEAN
    is_mixed = rows > 1 and finding.verdict is Verdict.MIXED
    is_user_code = is_user_step or traces.has_user_code(jaxpr, *marks.USED)
    if is_mixed or (is_mean and not is_user_code):
        return finding
    try:
        compared = _compare_traces(
            step, body, state, data, jaxpr, of_rows, is_user_step
        )
    except Exception as error:
        if traces.is_fault_of_package(error):
            raise
        # The step works only with this batch's shapes.
        if not is_mean or (is_user_step and not finding.has_losses):
            step.demand_global_batch(describe_error(error))
        return finding
    if not is_user_code:
        compared = Finding(verdict=compared.verdict, why=compared.why)
    if is_mean:
        return dataclasses.replace(compared, verdict=Verdict.MEAN)
    return compared


def _compare_traces(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    jaxpr: ClosedJaxpr,
    of_rows: range,
    is_user_step: bool,
) -> Finding:
    """Returns how a step depends on its rows, from a trace with more rows."""
    rows, of_one = step.facts.rows, None
    if rows == 1:
        # With one row, the row dimension looks like any other dimension of size
        # one.
        rows, of_one = 2, jaxpr
        jaxpr = _trace_with_rows(step, body, state, data, rows)
    twin = _trace_with_rows(
        step, body, state, data, step.num_replicas * rows, has_all_rows=True
    )
    finding = losses.losses_in(
        jaxpr, of_rows, rows, twin, is_user_step=is_user_step
    )
    if of_one is None:
        return finding
    agree = functools.partial(traces.agrees_with_one_row, of_one, jaxpr, twin)
    if traces.has_user_code(jaxpr, marks.LOSS) and not agree(marks.LOSS):
        return Finding(verdict=Verdict.MIXED)
    if is_user_step and not agree(*marks.USED):
        return dataclasses.replace(finding, counting=True)
    return finding


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


def _warn_of_log(equation: JaxprEqn) -> None:
    place = traces.find_place(equation)
    warning = LogWarning(
        "A value that a step returns for the logs is not shown to be a mean "
        f"over the batch's rows{f' (at {place})' if place else ''}. The log is "
        "the mean of the replicas' values, which may be another number. To log "
        "the number of the global batch, update a metric of `keras.metrics`, "
        "and return its result."
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
    if why is None:
        return ""
    place = traces.find_place(why)
    if why.primitive.name == "name":  # A mark, which combines nothing.
        return f" (at {place})" if place else ""
    operation = f"`{why.primitive.name}` combines rows"
    return f" ({operation}{f' at {place}' if place else ''})"


def _trace_with_rows(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    rows: int,
    *,
    has_all_rows: bool = False,
) -> ClosedJaxpr:
    """Traces the step with another number of rows."""
    facts = StepFacts(
        mesh=step.facts.mesh,
        rows=rows,
        is_twin=True,
        has_all_rows=has_all_rows,
    )
    twin = StepContext(facts=facts)
    with collect_updates(is_twin=True), warnings.catch_warnings():
        # The first trace has warned already.
        warnings.simplefilter("ignore")
        fn = functools.partial(body, twin)
        return jax.make_jaxpr(fn)(*state, with_leading((rows,), data))


def with_leading(
    sizes: tuple[int, ...],
    data: Batch,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """Returns a batch's shapes with different leading dimensions.

    Args:
      sizes: The dimensions that replace the row dimension.
      data: The batch.
      sharding: The sharding to set on the shapes, or None.

    Returns:
      A nest of `jax.ShapeDtypeStruct`, of shapes (*sizes, ...).
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (*sizes, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        data,
    )


def eval_with_rows(
    rows: int, body: Callable[..., Any], state: Sequence[Any], data: Batch
) -> Tree:
    """Computes the shapes of `body(*state, data)` for a number of rows.

    Returns:
      A nest of `jax.ShapeDtypeStruct`.
    """
    return jax.eval_shape(body, *state, with_leading((rows,), data))


def forget_losses(step: Callable[..., Any]) -> None:
    """Clears the losses that a failed trace left on its model.

    Keras stores the losses of a call on the model until the model's
    `compute_loss` reads them. Without this, the next trace would read the
    losses of the failed trace.

    Args:
      step: A model's train, test or predict step.
    """
    model = getattr(step, "__self__", None)
    if getattr(model, "_losses_override", None):
        model._losses_override = []  # type: ignore[union-attr]


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
