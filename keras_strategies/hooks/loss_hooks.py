"""Patches of losses, so that their mean is the loss of the global batch.

The denominators are chosen so that the mean of the replicas' losses is the loss
of the global batch. The mean of the replicas' gradients is then the gradient of
that loss.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from keras import ops
from keras.src.trainers.compile_utils import CompileLoss

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.hooks import metric_rules
from keras_strategies.hooks.gather_rows import (
    call_with_all_rows,
    note_rows,
)
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.replica_map import all_mean

if TYPE_CHECKING:
    import keras

_Method = Callable[..., Any]


def reduce_values(
    step: StepContext,
    original: _Method,
    values: Array,
    sample_weight: Array | None = None,
    reduction: str | None = "sum_over_batch_size",
) -> Array:
    """Reduces per-row losses so that the replicas' mean is the global loss.

    Returns:
      A scalar, or the unchanged values if `reduction` is None or "none".
    """
    if not step.sees_replica_rows or reduction in (None, "none"):
        return original(values, sample_weight, reduction)
    is_by_weight = reduction == "mean_with_sample_weight"
    weights = sample_weight if is_by_weight else None
    if step.is_empty:
        if weights is not None:
            # `_average` is a collective, so a replica without rows must take
            # part, too.
            _average(step, jnp.zeros((), values.dtype))
        # Keras would return the empty values, not a scalar.
        return jnp.sum(values)
    if tuple(values.shape) in ((), (0,)):
        return original(values, sample_weight, reduction)
    values = marks.mark(values, marks.VALUES)
    if weights is None and reduction != "sum":
        reduced = original(values, sample_weight, reduction)
        return marks.mark(reduced, marks.AVERAGED)
    values = marks.mark_both_ways(values, marks.VALUES)
    reduced = jnp.sum(values)
    if weights is None:
        reduced = reduced * step.num_sharing
    else:
        weight = jnp.sum(weights).astype(reduced.dtype)
        reduced = ops.divide_no_nan(reduced, _average(step, weight))
    reduced = _unweight(step, reduced)
    reduced = marks.mark_both_ways(reduced, marks.REDUCED)
    return marks.mark(reduced, marks.REDUCED)


def apply_mask(
    step: StepContext,
    original: _Method,
    sample_weight: Array | None,
    mask: Array | None,
    dtype: str,
    reduction: str | None,
) -> Array | None:
    """Combines a mask and sample weights as Keras does for a global batch.

    Keras multiplies the weights of the entries that the mask selects by the
    ratio of all entries to selected entries. Here this ratio is computed over
    the global batch instead of over one replica's rows.

    Returns:
      The weights, or None if there are neither weights nor a mask.
    """
    weighted = original(
        sample_weight, mask=mask, dtype=dtype, reduction=reduction
    )
    is_mean = reduction in ("mean", "sum_over_batch_size")
    if mask is None or not step.sees_replica_rows or not is_mean:
        return weighted
    mask = marks.mark(jnp.asarray(mask), marks.OWN)
    # Keras has multiplied each selected entry by total / kept, both counted
    # over this replica's rows. Multiplying by `kept` and dividing by the mean
    # of `kept` over the replicas gives the ratio of the global batch.
    kept = jnp.sum(jnp.asarray(mask, dtype=weighted.dtype))
    weighted = weighted * ops.divide_no_nan(kept, _average(step, kept))
    weighted = _unweight(step, weighted)
    return marks.mark(weighted, marks.NORMALIZED)


def call_loss(
    step: StepContext,
    original: _Method,
    loss: "keras.losses.Loss",
    *args: Tree,
    **kwargs: Tree,
) -> Array:
    """Calls a loss with this replica's rows, or with all replicas' rows.

    A loss whose value for one row depends on other rows receives the rows of
    all replicas.

    Returns:
      The loss: a scalar if the loss object reduces its values, else the values.
    """
    if not step.sees_replica_rows:
        return original(loss, *args, **kwargs)
    if isinstance(loss, CompileLoss):
        with step.flag("in_compiled"):
            return compute_loss(step, original, loss, *args, **kwargs)
    if not metric_rules.mixes_rows(loss, args, kwargs):
        return compute_loss(step, original, loss, *args, **kwargs)
    note_rows(step, (args, kwargs), f"loss {type(loss).__name__!r}")
    return call_with_all_rows(step, original, loss, *args, **kwargs)


def compute_loss(
    step: StepContext, original: _Method, *args: Any, **kwargs: Any
) -> Array:
    """Computes a loss; a scalar is also marked, or weighted by its rows.

    If all replicas have the same number of rows, the loss is marked, so that it
    can be checked at the end of the trace. Otherwise the loss is weighted by
    this replica's number of rows. A loss that is part of another loss is not
    changed.

    Args:
      step: The step that is being traced.
      original: The method of a model or of a loss that computes the loss.
      *args: The model or the loss, followed by the method's positional
        arguments.
      **kwargs: The method's keyword arguments.

    Returns:
      The loss: a scalar if the loss reduces its values, else the values.
    """
    if step.flags.in_loss:
        return original(*args, **kwargs)
    num_uses = len(step.notes.replica_uses)
    with step.flag("in_loss"):
        loss = original(*args, **kwargs)
    is_scalar = isinstance(loss, jax.Array) and not loss.ndim
    if not is_scalar or step.facts.rows_of_replicas is None:
        return mark_loss(step, loss)
    if step.is_empty:
        # The loss is zero but must still depend on the weights, so that its
        # gradient takes part in the all-reduce.
        return jnp.where(jnp.isnan(loss), 0.0, loss) * 0.0
    # A loss that calls a collective combines the replicas' values itself.
    if set(step.notes.replica_uses[num_uses:]) - {"replica_id_in_sync_group"}:
        return loss
    return marks.mark_both_ways(loss * step.weight, marks.WEIGHTED)


def _average(step: StepContext, value: Array) -> Array:
    """Returns the mean of a value over the replicas that have rows."""
    mean = all_mean(value, step.axis)
    if step.num_sharing == step.num_replicas:
        return mean
    return mean * (step.num_replicas / step.num_sharing)


def _unweight(step: StepContext, value: Array) -> Array:
    """Divides a value by this replica's weight, which later multiplies it.

    This is for values whose mean over the replicas is already the value for the
    global batch. The later weighting by rows must not change them.
    """
    return value if step.weight in (0.0, 1.0) else value / step.weight


def mark_loss(step: StepContext, value: Leaf) -> Leaf:
    """Marks a scalar as a loss of one replica's rows.

    Returns:
      The marked value, if it is a scalar that was computed from this replica's
      rows only; otherwise the unchanged value.
    """
    is_per_replica = step.sees_replica_rows and not step.facts.is_local
    is_scalar = isinstance(value, jax.Array) and not value.ndim
    if not is_per_replica or not is_scalar:
        return value
    return marks.mark(value, marks.LOSS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def divide_gradient(loss: Array, count: float) -> Array:
    """Returns the loss, whose gradient is divided by a number."""
    del count
    return loss


@divide_gradient.defjvp
def _divide_tangent(
    count: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    return primals[0], tangents[0] / count
