"""Checks of a step's trace before it is used."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies._core.batches import RowShape, sharded_rows, true_rows
from keras_strategies._core.jaxprs import traces
from keras_strategies._core.jaxprs.combined_sums import with_combined_sums
from keras_strategies._core.jaxprs.marked_updates import collected_updates
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    all_sum,
    has_unsafe_scatters,
    has_unsure_collectives,
)
from keras_strategies._core.row_kinds import losses
from keras_strategies._core.row_kinds.losses import Finding, Verdict
from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge.step_context import (
    Group,
    StepContext,
    StepFacts,
)


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

    def __init__(self, fn: Callable[..., Any], *args: Tree) -> None:
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

    def __call__(self, *args: Tree) -> Tree:
        """Computes the function as it was traced."""
        leaves = self._compute(*jax.tree.leaves(args))
        return jax.tree.unflatten(self._structure, leaves)


def traced_once(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
) -> tuple[Any, ...]:
    """Traces `body(step, *state, data)` and looks at it before it is used.

    Raises:
      GlobalBatchNeeded: the replicas would communicate in a branch or a loop
        that not all of them need take, and wait for each other for ever; or
        something was taken for the batch's rows, or not, by its size alone.
    """
    args = (*state, data)
    traced = Traced(functools.partial(body, step), *args)
    # Where replicas meet is said by who asks for others in a step.
    is_own = not step.notes.replica_uses
    if is_own and has_unsure_collectives(traced.jaxpr):
        step.demand_global_batch(
            "gradients or metrics are reduced over the replicas inside of a "
            "`cond`, `switch` or `while_loop`, which not every replica may "
            "enter. Apply optimizers and update metrics outside of it"
        )
    if step.notes.sizes:
        _check_sizes(step, body, state, data)
    if is_own and step.num_replicas > 1:
        _check_losses(step, body, state, data, traced.jaxpr)
    if _are_sums_expensive(step):
        traced.combine_sums(step)
    return traced(*args)


def sums_combined(
    fn: Callable[..., Any], step: StepContext
) -> Callable[..., Any]:
    """A function with its sums over the replicas made together."""
    if not _are_sums_expensive(step):
        return fn

    def combined(*args: Tree) -> Tree:
        traced = Traced(fn, *args)
        traced.combine_sums(step)
        return traced(*args)

    return combined


def _are_sums_expensive(step: StepContext) -> bool:
    """Whether each array costs much; compilers elsewhere combine them."""
    mesh = step.facts.mesh
    is_between = mesh.num_processes > 1 and mesh.num_replicas > 1
    return mesh.platform == "cpu" and is_between


def call_on_global_batch(
    body: Callable[..., Any],
    state: tuple[Any, ...],
    data: Batch,
    shape: RowShape,
    mesh: ReplicaMesh,
) -> tuple[Any, ...]:
    """Computes `body(*state, data)` of a padded batch's true rows."""
    data = true_rows(data, shape)
    traced = Traced(body, *state, data)
    is_sharded = not has_unsafe_scatters(traced.jaxpr)
    data = sharded_rows(data, shape, mesh, is_sharded=is_sharded)
    return traced(*state, data)


def _check_sizes(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
) -> None:
    """Traces with twice the rows: what counts rows doubles, no other size."""
    probe = step.probe(2 * step.facts.rows)
    try:
        probed = functools.partial(body, probe)
        eval_with_rows(probe.facts.rows, probed, state, data)
    except Exception as error:
        step.demand_global_batch(
            "metrics or marked losses are given arrays in a step of your own, "
            "and whether those have rows shows only in a trace with another "
            f"number of rows, which failed: {reason_of(error)}"
        )
    sizes = [size for size, _, _ in probe.notes.sizes]
    for k, (size, is_rows, of) in enumerate(step.notes.sizes):
        if sizes[k : k + 1] != [2 * size if is_rows else size]:
            step.demand_global_batch(
                f"{of} is given an array or a number that is as large as the "
                "batch's rows by chance, or counts them. Give it arrays with "
                "rows; `keras.metrics.Mean` takes a mean over rows, too"
            )


def _check_losses(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    jaxpr: ClosedJaxpr,
) -> None:
    """Checks that the losses are means over the rows; traces again if need be.

    The second trace has the rows of the global batch, which tells what is
    made of their number: constants, shapes, and what code of the user's does
    for some numbers alone.
    """
    inputs = len(jaxpr.jaxpr.invars)
    of_rows = range(inputs - len(jax.tree.leaves(data)), inputs)
    rows, num_replicas = step.facts.rows, step.num_replicas
    finding = Finding(verdict=Verdict.UNSURE)
    is_own = traces.has_own_code(jaxpr, losses.LOSS)
    try:
        if not is_own:
            finding = losses.losses_in(jaxpr, of_rows, rows)
        is_unsure = finding.verdict is Verdict.UNSURE
        if is_unsure or (rows == 1 and finding.verdict is Verdict.MIXED):
            of_one, is_one = jaxpr, rows == 1
            if is_one:
                # A dimension of one row looks like any other of size one.
                rows = 2
                jaxpr = _traced_with(step, body, state, data, rows)
            twin = _traced_with(step, body, state, data, num_replicas * rows)
            finding = losses.losses_in(jaxpr, of_rows, rows, twin)
            if is_one and is_own and not _goes_on(of_one, jaxpr, twin):
                finding = Finding(verdict=Verdict.MIXED)
    except Exception:
        # Its shapes are those of this batch, so nothing more is known.
        finding = Finding(verdict=Verdict.MIXED)
    if finding.verdict is not Verdict.MEAN:
        step.demand_global_batch(_LOSS_REASON.format(place=_shown(finding.why)))


def _goes_on(one: Any, two: Any, more: Any) -> bool:
    """Whether a trace of one row is as those of two and of more rows.

    A number of theirs that is a power of the number of rows is 1, times what
    does not depend on it, where there is one.
    """
    computed = [traces.computations_in(j, losses.LOSS) for j in (one, two)]
    if computed[0] != computed[1]:
        return False
    known, small, large = (
        traces.numbers_in(j, losses.LOSS) for j in (one, two, more)
    )
    rows = [j.jaxpr.invars[-1].aval.shape[0] for j in (two, more)]
    for low, high in zip(small, large, strict=True):
        if low == high or low != low:
            continue
        power = np.log(high / low) / np.log(rows[1] / rows[0])
        if not np.isclose(known, low / rows[0] ** power, rtol=1e-4).any():
            return False
    return True


_LOSS_REASON = (
    "its loss is not a mean over the batch's rows{place}, so the mean of the "
    "replicas' losses would be a different number. To run it replica by "
    "replica, compute a loss for each row and return `ops.mean` of these, or "
    "mark the loss with `ks.global_batch_loss`, which gathers the rows"
)


def _shown(why: JaxprEqn | None) -> str:
    """Describes the equation that mixes rows, for messages."""
    if why is None:
        return ""
    place = traces.place_of(why)
    operation = f"`{why.primitive.name}` combines rows"
    return f" ({operation}{f' at {place}' if place else ''})"


def _traced_with(
    step: StepContext,
    body: Callable[..., Any],
    state: Sequence[Group],
    data: Batch,
    rows: int,
) -> ClosedJaxpr:
    """Traces the step with another number of rows."""
    twin = StepContext(facts=StepFacts(mesh=step.facts.mesh, rows=rows))
    with collected_updates(), warnings.catch_warnings():
        # What there is to say was said in the first trace.
        warnings.simplefilter("ignore")
        fn = functools.partial(body, twin)
        return jax.make_jaxpr(fn)(*state, with_leading((rows,), data))


def with_leading(
    sizes: tuple[int, ...],
    data: Batch,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """Returns the shapes of a batch with other leading dimensions.

    Args:
      sizes: What takes the place of the number of rows.
      data: The batch.
      sharding: Of the shapes; None: none.

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
    """The shapes that `body(*state, data)` has for another number of rows.

    Returns:
      A nest of `jax.ShapeDtypeStruct`.
    """
    return jax.eval_shape(body, *state, with_leading((rows,), data))


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


def warn_of_global_batch(reason: str) -> None:
    """Warns that a step is not mapped over the replicas, and why."""
    warnings.warn(
        "This step runs over the global batch instead of replica by replica, "
        f"which is exact and may be slower: {reason}.",
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
