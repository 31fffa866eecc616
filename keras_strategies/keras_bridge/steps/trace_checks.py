"""Checks of a step's trace before it is used."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from keras_strategies._core.batches import RowShape, sharded_rows, true_rows
from keras_strategies._core.jaxprs.combined_sums import with_combined_sums
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    all_sum,
    has_unsafe_scatters,
    has_unsure_collectives,
)
from keras_strategies._core.step_types import Batch
from keras_strategies.keras_bridge.row_checks import row_degrees, suspect_loss
from keras_strategies.keras_bridge.step_context import StepContext


class StepsNotFused(Exception):
    """Raised by a trace: the steps are faster one by one.

    XLA computes gradients of convolutions up to twenty times slower inside of
    a loop on CPU (jaxlib 0.10.2).
    """


class Traced:
    """A function that was traced once, to be looked at before it is used.

    Args:
      fn: The function.
      *args: Arguments to trace it with.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._structure = jax.tree.structure(shapes)
        self._compute = jaxpr_as_fun(self.jaxpr)

    def combine_sums(self, step: StepContext) -> None:
        """Makes sums over the replicas together (combined_sums.py)."""
        self._compute = with_combined_sums(
            self.jaxpr,
            step.axis,
            lambda leaves: all_sum(leaves, step.axis, step.buffering),
        )

    def __call__(self, *args: Any) -> Any:
        """Computes the function as it was traced."""
        leaves = self._compute(*jax.tree.leaves(args))
        return jax.tree.unflatten(self._structure, leaves)


def traced_once(
    step: StepContext, body: Callable[..., Any], state: Any, data: Batch
) -> Any:
    """Traces `body(step, *state, data)` and looks at it before it is used.

    Raises:
      WholeBatchNeeded: the replicas would communicate in a branch or a loop
        that not all of them need take, and wait for each other for ever; or
        something was taken for the batch's rows, or not, by its size alone.
    """
    args = (*state, data)
    traced = Traced(functools.partial(_with_losses, step, body), *args)
    if has_unsure_collectives(traced.jaxpr):
        step.demand_whole(
            "gradients or metrics are reduced over the replicas inside of a "
            "`cond`, `switch` or `while_loop`, which not every replica may "
            "enter. Apply optimizers and update metrics outside of it"
        )
    if step.notes.sizes:
        _check_sizes(step, body, state, data)
    if step.notes.losses:
        _check_losses(step, body, state, data, traced.jaxpr)
    if _are_sums_expensive(step):
        traced.combine_sums(step)
    outputs, _ = traced(*args)
    return outputs


def sums_combined(fn: Callable[..., Any], step: StepContext) -> Any:
    """A function with its sums over the replicas made together."""
    if not _are_sums_expensive(step):
        return fn

    def combined(*args: Any) -> Any:
        traced = Traced(fn, *args)
        traced.combine_sums(step)
        return traced(*args)

    return combined


def _are_sums_expensive(step: StepContext) -> bool:
    """Whether each array costs much; compilers elsewhere combine them."""
    mesh = step.facts.mesh
    is_between = mesh.num_processes > 1 and mesh.num_replicas > 1
    return mesh.platform == "cpu" and is_between


def _with_losses(
    step: StepContext, body: Callable[..., Any], *args: Any
) -> Any:
    step.note_losses()
    outputs = body(step, *args)
    return outputs, list(step.notes.losses)


def whole_batch(
    body: Callable[..., Any],
    state: tuple[Any, ...],
    data: Batch,
    shape: RowShape,
    mesh: ReplicaMesh,
) -> Any:
    """Computes `body(*state, data)` of a padded batch's true rows."""
    data = true_rows(data, shape)
    traced = Traced(body, *state, data)
    is_divided = not has_unsafe_scatters(traced.jaxpr)
    data = sharded_rows(data, shape, mesh, is_divided=is_divided)
    return traced(*state, data)


def _check_sizes(
    step: StepContext, body: Callable[..., Any], state: Any, data: Batch
) -> None:
    """Traces with twice the rows: what counts rows doubles, no other size."""
    probe = step.probe(2 * step.facts.rows)
    try:
        probed = functools.partial(body, probe)
        eval_with_rows(probe.facts.rows, probed, state, data)
    except Exception as error:
        step.demand_whole(
            "metrics or marked losses are given arrays in a step of your own, "
            "and whether those have rows shows only in a trace with another "
            f"number of rows, which failed: {reason_of(error)}"
        )
    sizes = [size for size, _, _ in probe.notes.sizes]
    for k, (size, is_rows, of) in enumerate(step.notes.sizes):
        if sizes[k : k + 1] != [2 * size if is_rows else size]:
            step.demand_whole(
                f"{of} is given an array or a number that is as large as the "
                "batch's rows by chance, or counts them. Give it arrays with "
                "rows; `keras.metrics.Mean` takes a mean over rows, too"
            )


def _check_losses(
    step: StepContext,
    body: Callable[..., Any],
    state: Any,
    data: Batch,
    jaxpr: Any,
) -> None:
    """Looks whether the loss is a mean over the rows, where it may be none."""
    places = _loss_and_rows(jaxpr, data)
    if not suspect_loss.is_suspect(jaxpr, *places, step.facts.rows):
        return
    try:
        small, large = (
            _probed(step, body, state, data, rows)
            for rows in (step.facts.rows, 2 * step.facts.rows)
        )
    except Exception:
        # It has shapes of its own, which is no fault of the loss.
        return
    if row_degrees.is_no_mean(small, large, *_loss_and_rows(small, data)):
        step.demand_whole(
            "its loss is no mean over the rows, so the mean of the replicas' "
            "losses is another one: `add_loss` is given a sum over rows, or a "
            "layer or loss adds rows up. Take means over rows (`ops.mean`), "
            "and sums within each alone"
        )


def _loss_and_rows(closed: Any, data: Batch) -> tuple[int, range]:
    """Which output of a trace the loss is, and which inputs have rows."""
    inputs = len(closed.jaxpr.invars)
    of_rows = range(inputs - len(jax.tree.leaves(data)), inputs)
    return len(closed.jaxpr.outvars) - 1, of_rows


def _probed(
    step: StepContext,
    body: Callable[..., Any],
    state: Any,
    data: Batch,
    rows: int,
) -> Any:
    """A trace with some number of rows; its last output is the loss."""
    probe = step.probe(rows)
    fn = functools.partial(_with_losses, probe, body)
    return jax.make_jaxpr(fn)(*state, with_rows(rows, data))


def with_rows(rows: int, data: Batch, sharding: Any = None) -> Any:
    """The shapes of a batch with another number of rows."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        data,
    )


def eval_with_rows(
    rows: int, body: Callable[..., Any], state: Any, data: Batch
) -> Any:
    """The shapes that `body(*state, data)` has for another number of rows."""
    return jax.eval_shape(body, *state, with_rows(rows, data))


def forget_losses(step: Callable[..., Any]) -> None:
    """Clears what a failed trace left on its model.

    Keras keeps the losses of a call on the model until its `compute_loss` has
    read them, and would read those of the failed trace in the next one.

    Args:
      step: A model's train, test or predict step.
    """
    model = getattr(step, "__self__", None)
    if getattr(model, "_losses_override", None):
        model._losses_override = []  # type: ignore[union-attr]


def warn_of_whole(reason: str) -> None:
    """Warns that a step is not mapped over the replicas, and why."""
    warnings.warn(
        "This step is run over the whole batch instead of replica by "
        f"replica, which is exact and may be slower: {reason}.",
        UserWarning,
        stacklevel=2,
    )


def reason_of(error: Exception) -> str:
    """Why a step is not mapped over the replicas, from a trace's error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (
        "it cannot be traced with one replica's share of the rows "
        f"({type(error).__name__}: {lines[0] if lines else ''}). Leave the "
        "batch size out of the model's shapes"
    )
