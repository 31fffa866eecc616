"""Changes to losses while a step is traced: denominators of all rows.

A replica's loss is such that the mean over the replicas is the global loss,
and so is the mean of their gradients.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from keras import ops
from keras.src.trainers.compile_utils import CompileLoss

from keras_strategies._core.replica_map import all_mean
from keras_strategies.keras_bridge.hooks import metric_rules
from keras_strategies.keras_bridge.hooks.gather_rows import gathered, note_rows
from keras_strategies.keras_bridge.row_checks.suspect_loss import (
    mean_of,
    share_of_a_sum,
)
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
    if reduction == "sum":
        return share_of_a_sum(values, step.num_replicas)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = jnp.sum(values)
        weight = jnp.sum(sample_weight).astype(total.dtype)
        return ops.divide_no_nan(total, all_mean(weight, step.axis))
    return mean_of(lambda v: original(v, sample_weight, reduction), values)


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
    return weighted * ops.divide_no_nan(kept, mean_kept)


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
            return original(loss, *args, **kwargs)
    if not metric_rules.mixes_rows(loss, metric_rules.rank((args, kwargs))):
        return original(loss, *args, **kwargs)
    note_rows(step, (args, kwargs), f"loss {type(loss).__name__!r}")
    args, kwargs = gathered(step, (args, kwargs))
    with step.flag("is_whole"):
        return original(loss, *args, **kwargs)
