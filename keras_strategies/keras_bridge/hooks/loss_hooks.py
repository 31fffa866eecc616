"""Changes to losses while a step is traced: denominators of all rows.

A replica's loss is such that the mean over the replicas is the global loss,
and so is the mean of their gradients.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from keras import ops
from keras.src.trainers.compile_utils import CompileLoss

from keras_strategies._core.replica_map import all_mean
from keras_strategies._core.row_kinds import losses
from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.keras_bridge.hooks import metric_rules
from keras_strategies.keras_bridge.hooks.gather_rows import (
    call_with_all,
    note_rows,
)
from keras_strategies.keras_bridge.step_context import StepContext

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
    """A loss's values reduced with the denominator of all replicas' rows.

    Returns:
      A scalar, or the values as they are where nothing reduces them.
    """
    is_own = step.sees_own_rows
    if is_own and step.is_empty and reduction not in (None, "none"):
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            # The others take part in it.
            _mean(step, jnp.zeros((), values.dtype))
        # Keras would return the values, which are none.
        return jnp.sum(values)
    if (
        not is_own
        or reduction in (None, "none")
        or tuple(values.shape) in ((), (0,))
    ):
        return original(values, sample_weight, reduction)
    values = losses.mark(values, losses.VALUES)
    if reduction == "sum":
        reduced = _exact(step, jnp.sum(values) * step.num_sharing)
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = jnp.sum(values)
        weight = jnp.sum(sample_weight).astype(total.dtype)
        reduced = ops.divide_no_nan(total, _mean(step, weight))
        reduced = _exact(step, reduced)
    else:
        reduced = original(values, sample_weight, reduction)
        return losses.mark(reduced, losses.AVERAGED)
    return losses.mark(reduced, losses.REDUCED)


def apply_mask(
    step: StepContext,
    original: _Method,
    sample_weight: Array | None,
    mask: Array | None,
    dtype: str,
    reduction: str | None,
) -> Array | None:
    """Weights of masked entries, by the kept entries of all replicas.

    Returns:
      Weights, or None where neither weights nor a mask are given.
    """
    weighted = original(
        sample_weight, mask=mask, dtype=dtype, reduction=reduction
    )
    is_mean = reduction in ("mean", "sum_over_batch_size")
    if mask is None or not step.sees_own_rows or not is_mean:
        return weighted
    mask = losses.mark(jnp.asarray(mask), losses.OWN)
    # Keras gives each kept entry the weight total / kept, of its own rows;
    # dividing by the mean of `kept` over the replicas makes it the batch's.
    kept = jnp.sum(jnp.asarray(mask, dtype=weighted.dtype))
    weighted = weighted * ops.divide_no_nan(kept, _mean(step, kept))
    weighted = _exact(step, weighted)
    return losses.mark(weighted, losses.NORMALIZED)


def call_loss(
    step: StepContext,
    original: _Method,
    loss: "keras.losses.Loss",
    *args: Tree,
    **kwargs: Tree,
) -> Array:
    """A loss of this replica's rows, or of all where it mixes rows.

    Returns:
      What the loss returns: a scalar, if it reduces its values.
    """
    if not step.sees_own_rows:
        return original(loss, *args, **kwargs)
    if isinstance(loss, CompileLoss):
        with step.flag("in_compiled"):
            return compute_loss(step, original, loss, *args, **kwargs)
    if not metric_rules.mixes_rows(loss, metric_rules.rank((args, kwargs))):
        return compute_loss(step, original, loss, *args, **kwargs)
    note_rows(step, (args, kwargs), f"loss {type(loss).__name__!r}")
    return call_with_all(step, original, loss, *args, **kwargs)


def compute_loss(
    step: StepContext, original: _Method, *args: Any, **kwargs: Any
) -> Array:
    """Marks a loss that is not part of another one, and weights it by the rows.

    Args:
      step: The step that is traced, which looks at marked losses in the end.
      original: The method of a model or of a loss.
      *args: The model or the loss, and what the method is called with.
      **kwargs: The same, by name.

    Returns:
      The loss, a scalar if it reduces its values.
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
        # Nothing; but its gradient meets those of others.
        return jnp.where(jnp.isnan(loss), 0.0, loss) * 0.0
    # Its author has said how replicas meet, where it asks for others.
    is_own = len(step.notes.replica_uses) == num_uses
    return loss * step.weight if is_own else loss


def _mean(step: StepContext, value: Array) -> Array:
    """The mean over the replicas that have rows."""
    mean = all_mean(value, step.axis)
    if step.num_sharing == step.num_replicas:
        return mean
    return mean * (step.num_replicas / step.num_sharing)


def _exact(step: StepContext, value: Array) -> Array:
    """A value that is exact as it is: not to be weighted by the rows."""
    return value if step.weight in (0.0, 1.0) else value / step.weight


def mark_loss(step: StepContext, value: Leaf) -> Leaf:
    """Marks what is taken for a replica's loss: a scalar of its own rows.

    Returns:
      The value, marked if it is such a scalar.
    """
    is_own = step.sees_own_rows and not step.facts.is_local
    if not is_own or not isinstance(value, jax.Array) or value.ndim:
        return value
    return losses.mark(value, losses.LOSS)
