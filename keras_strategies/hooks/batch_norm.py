"""`BatchNormalization(synchronized=True)` on JAX.

Keras rejects `synchronized=True` on JAX. In a strategy's scope the constructor
accepts it, and the layer computes its mean and variance over the rows of all
replicas. This takes two passes, because the variance is computed from the
differences from the global mean.

References:
  - Peng et al., MegDet (2018), on synchronized BatchNormalization:
    https://arxiv.org/abs/1711.07240
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import StepContext, current_step
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.replica_map import all_mean


def accept_synchronized(
    original: Callable[..., None], entered: Callable[[], Any]
) -> Callable[..., None]:
    """Wraps the layer's constructor so that it accepts `synchronized=True`.

    Args:
      original: The constructor.
      entered: A function that returns the strategy whose scope the calling
        thread is in, or None.
    """

    @functools.wraps(original)
    def init(
        self: keras.layers.BatchNormalization, *args: Any, **kwargs: Any
    ) -> None:
        if not kwargs.get("synchronized") or entered() is None:
            original(self, *args, **kwargs)
            return
        original(self, *args, **(kwargs | {"synchronized": False}))
        self.synchronized = True
        # The method is replaced on the instance only, so that Keras's class
        # stays unchanged.
        object.__setattr__(
            self, "_moments", types.MethodType(compute_moments, self)
        )

    # Keras inspects the constructor's signature in two ways. Both must find the
    # same signature, but only one of them follows `__wrapped__`.
    del init.__wrapped__  # type: ignore[attr-defined]
    return init


def compute_moments(
    layer: keras.layers.BatchNormalization, inputs: Array, mask: Array | None
) -> tuple[Any, Any]:
    """Computes the mean and variance over all axes except the layer's axis.

    In a replica-mapped step and in `run`, they are computed over the rows of
    all replicas, and elsewhere over the rows of `inputs` only. Entries that the
    mask excludes are ignored, as in Keras.

    Returns:
      The mean and the variance, without the axes over which they are computed.
    """
    step = current_step()
    is_run = step is not None and step.facts.is_local
    # Replicas may have different numbers of rows.
    is_ragged = is_run or (step is not None and step.facts.is_ragged)
    if step is not None and step.flags.sees_global_batch and not is_run:
        step = None  # The inputs already have all rows.

    axes = list(layer._reduction_axes or ())
    if mask is not None:
        compute_mean = _make_masked_mean(step, axes, inputs, mask)
    else:
        compute_mean = _make_row_mean(step, axes, is_ragged=is_ragged)
    mean = compute_mean(inputs)
    variance = compute_mean(ops.square(inputs - mean))
    moments = ops.squeeze(mean, axes), ops.squeeze(variance, axes)
    return moments if step is None else _mark_moments(step, moments)


def find_moments(
    step: StepContext,
    original: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Computes the mean and variance of a replica's rows."""
    return _mark_moments(step, original(layer, *args, **kwargs))


def _mark_moments(
    step: StepContext, moments: tuple[Array, Array]
) -> tuple[Any, Any]:
    if step.facts.is_local:
        return moments
    mean, variance = (marks.mark_both_ways(m, marks.STATISTIC) for m in moments)
    return mean, variance


def _make_row_mean(
    step: StepContext | None, axes: list[int], *, is_ragged: bool
) -> Callable[[Array], Any]:
    def compute_mean(value: Array) -> Array:
        if step is None or not is_ragged:
            return _average(step, ops.mean(value, axes, keepdims=True))
        count = math.prod(value.shape[axis] for axis in axes)
        total = _average(step, ops.sum(value, axes, keepdims=True))
        return total / _average(step, ops.full_like(total, count))

    return compute_mean


def _make_masked_mean(
    step: StepContext | None, axes: list[int], inputs: Array, mask: Array
) -> Callable[[Array], Any]:
    """Returns a function that averages the entries that a mask selects."""
    kept = ops.cast(
        ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), "bool"
    )
    count = ops.sum(ops.cast(kept, inputs.dtype), axes, keepdims=True)
    count = _average(step, count)
    # On one device, Keras would add epsilon to the count of the global batch.
    # `count` is that count divided by the number of replicas, so epsilon is
    # divided by this number, too.
    num_replicas = 1 if step is None else step.num_replicas
    weight = count + keras.config.epsilon() / num_replicas

    def compute_mean(value: Array) -> Array:
        total = ops.sum(ops.where(kept, value, 0), axes, keepdims=True)
        return _average(step, total) / weight

    return compute_mean


def _average(step: StepContext | None, value: Array) -> Array:
    return value if step is None else all_mean(value, step.axis)


def call_layer(
    step: StepContext,
    original: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    inputs: Array,
    *args: Any,
    **kwargs: Any,
) -> Array:
    """Calls the layer, and marks its output as normalized.

    The layer's statistics mix rows by definition: those of one replica or, with
    `synchronized=True`, those of all replicas. Because of the marks, the later
    check of losses does not report that the rows in the loss depend on each
    other.

    Returns:
      The normalized rows, of the inputs' shape.
    """
    if step.facts.is_local:
        return original(layer, inputs, *args, **kwargs)
    inputs = marks.mark(inputs, marks.OWN)
    normalized = original(layer, inputs, *args, **kwargs)
    return marks.mark(normalized, marks.NORMALIZED)
