"""Changes to losses while a step is traced: denominators of all rows.

A replica's loss is such that the mean over the replicas is the global loss,
and so is the mean of their gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from keras import ops
from keras.src.trainers.compile_utils import CompileLoss

from keras_strategies._core.replica_map import all_mean
from keras_strategies._core.row_kinds import losses
from keras_strategies.keras_bridge.hooks import metric_rules
from keras_strategies.keras_bridge.hooks.gather_rows import gathered, note_rows
from keras_strategies.keras_bridge.step_context import StepContext

_Method = Callable[..., Any]


def reduce_values(
    step: StepContext,
    original: _Method,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """A loss's values reduced with the denominator of all replicas' rows."""
    if (
        step.flags.is_whole
        or step.flags.in_metric
        or reduction in (None, "none")
        or tuple(values.shape) in ((), (0,))
    ):
        return original(values, sample_weight, reduction)
    values = losses.mark(values, losses.VALUES)
    if reduction == "sum":
        reduced = jnp.sum(values) * step.num_replicas
    elif reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = jnp.sum(values)
        weight = jnp.sum(sample_weight).astype(total.dtype)
        reduced = ops.divide_no_nan(total, all_mean(weight, step.axis))
    else:
        reduced = original(values, sample_weight, reduction)
    return losses.mark(reduced, losses.REDUCED)


def apply_mask(
    step: StepContext,
    original: _Method,
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: str | None,
) -> Any:
    """Weights of masked entries, by the kept entries of all replicas."""
    weighted = original(
        sample_weight, mask=mask, dtype=dtype, reduction=reduction
    )
    if (
        mask is None
        or step.flags.is_whole
        or step.flags.in_metric
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return weighted
    # Keras gives each kept entry the weight total / kept, of its own rows;
    # dividing by the mean of `kept` over the replicas makes it the batch's.
    kept = jnp.sum(jnp.asarray(mask, dtype=weighted.dtype))
    mean_kept = all_mean(kept, step.axis)
    weighted = weighted * ops.divide_no_nan(kept, mean_kept)
    return losses.mark(weighted, losses.NORMALIZED)


def call_loss(
    step: StepContext,
    original: _Method,
    loss: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A loss of this replica's rows, or of all where it mixes rows."""
    if step.flags.is_whole or step.flags.in_metric:
        return original(loss, *args, **kwargs)
    if isinstance(loss, CompileLoss):
        with step.flag("in_compiled"):
            return mark_loss(step, original(loss, *args, **kwargs))
    if not metric_rules.mixes_rows(loss, metric_rules.rank((args, kwargs))):
        return mark_loss(step, original(loss, *args, **kwargs))
    note_rows(step, (args, kwargs), f"loss {type(loss).__name__!r}")
    args, kwargs = gathered(step, (args, kwargs))
    with step.flag("is_whole"):
        return original(loss, *args, **kwargs)


def compute_loss(
    step: StepContext, original: _Method, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Marks a model's loss, to be looked at once the step is traced."""
    return mark_loss(step, original(model, *args, **kwargs))


def mark_loss(step: StepContext, value: Any) -> Any:
    """Marks what is taken for a replica's loss: a scalar of its own rows."""
    is_own = not (
        step.facts.is_local or step.flags.is_whole or step.flags.in_metric
    )
    if not is_own or not isinstance(value, jax.Array) or value.ndim:
        return value
    return losses.mark(value, losses.LOSS)
