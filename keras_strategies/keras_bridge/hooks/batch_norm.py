"""`BatchNormalization(synchronized=True)` on JAX.

Keras refuses the flag on JAX. While a scope is open its constructor accepts
it, and such a layer computes its moments over the rows of all replicas, in
two passes (the variance from the global mean).

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

from keras_strategies._core.replica_map import all_mean
from keras_strategies._core.row_kinds import losses
from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import StepContext, current_step


def accepting_init(
    original: Callable[..., None], entered: Callable[[], Any]
) -> Callable[..., None]:
    """Wraps the layer's constructor so that it accepts `synchronized=True`.

    Args:
      original: The constructor.
      entered: Returns the strategy whose scope the thread is in, or None.
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
        # An attribute of the instance: the class stays Keras's own.
        object.__setattr__(
            self, "_moments", types.MethodType(global_moments, self)
        )

    # Keras reads the signature in two ways, one of which would look through.
    del init.__wrapped__  # type: ignore[attr-defined]
    return init


def global_moments(
    layer: keras.layers.BatchNormalization, inputs: Array, mask: Array | None
) -> tuple[Any, Any]:
    """Returns mean and variance of `inputs` over all axes but the layer's.

    In a replica-mapped step, and in `run`, over the rows of all replicas;
    elsewhere over the rows at hand. With a mask, as Keras does, over the
    entries it keeps.
    """
    step = current_step()
    is_run = step is not None and step.facts.is_local
    # Replicas may hold different numbers of rows.
    is_uneven = is_run or (step is not None and step.facts.is_uneven)
    if step is not None and step.flags.sees_global_batch and not is_run:
        step = None  # It sees all rows.

    axes = list(layer._reduction_axes or ())
    if mask is not None:
        mean_of = _mean_of_kept(step, axes, inputs, mask)
    else:
        mean_of = _mean_of_rows(step, axes, is_uneven=is_uneven)
    mean = mean_of(inputs)
    variance = mean_of(ops.square(inputs - mean))
    return ops.squeeze(mean, axes), ops.squeeze(variance, axes)


def _mean_of_rows(
    step: StepContext | None, axes: list[int], *, is_uneven: bool
) -> Callable[[Array], Any]:
    def mean_of(value: Array) -> Array:
        if step is None or not is_uneven:
            return _over_replicas(step, ops.mean(value, axes, keepdims=True))
        count = math.prod(value.shape[axis] for axis in axes)
        total = _over_replicas(step, ops.sum(value, axes, keepdims=True))
        return total / _over_replicas(step, ops.full_like(total, count))

    return mean_of


def _mean_of_kept(
    step: StepContext | None, axes: list[int], inputs: Array, mask: Array
) -> Callable[[Array], Any]:
    """Returns what takes the mean of the entries that a mask keeps."""
    kept = ops.cast(
        ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), "bool"
    )
    count = ops.sum(ops.cast(kept, inputs.dtype), axes, keepdims=True)
    count = _over_replicas(step, count)
    # Keras adds epsilon to the count of the global batch.
    num_replicas = 1 if step is None else step.num_replicas
    weight = count + keras.config.epsilon() / num_replicas

    def mean_of(value: Array) -> Array:
        total = ops.sum(ops.where(kept, value, 0), axes, keepdims=True)
        return _over_replicas(step, total) / weight

    return mean_of


def _over_replicas(step: StepContext | None, value: Array) -> Array:
    return value if step is None else all_mean(value, step.axis)


def call_layer(
    step: StepContext,
    original: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    inputs: Array,
    *args: Any,
    **kwargs: Any,
) -> Array:
    """Marks rows that were normalized with statistics of a replica's rows.

    They are the replica's by definition, so a loss of them mixes no rows.

    Returns:
      The normalized rows, of the inputs' shape.
    """
    if step.facts.is_local:
        return original(layer, inputs, *args, **kwargs)
    inputs = losses.mark(inputs, losses.OWN)
    normalized = original(layer, inputs, *args, **kwargs)
    return losses.mark(normalized, losses.NORMALIZED)
