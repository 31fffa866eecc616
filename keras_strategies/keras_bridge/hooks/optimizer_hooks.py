"""Changes to optimizers while a step is traced: gradients of all replicas.

Loss scaling and gradient accumulation are Keras's own, on reduced gradients.

References:
  - Micikevicius et al., Mixed Precision Training (2018), on loss scaling:
    https://arxiv.org/abs/1710.03740
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._core.replica_map import all_max, all_sum
from keras_strategies.keras_bridge.step_context import StepContext

_Method = Callable[..., Any]


def apply(
    step: StepContext,
    original: _Method,
    optimizer: Any,
    grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Reduces the gradients, then lets the optimizer apply them."""
    if step.flags.in_optimizer:
        return original(optimizer, grads, *args, **kwargs)
    variables = args[0] if args else kwargs.get("trainable_variables")
    if variables is None:
        variables = _known_variables(optimizer)
    grads = _reduce_gradients(step, optimizer, grads, variables)
    with step.flag("in_optimizer"):
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if step.facts.is_local and is_scaling:
            result = _apply_purely(optimizer, grads, list(variables))
        else:
            result = original(optimizer, grads, *args, **kwargs)
    # Equal on all replicas, as the gradients were.
    applied = (*variables, *optimizer.variables)
    step.notes.equal.update(variable.value for variable in applied)
    return result


def stateless_apply(
    step: StepContext,
    original: _Method,
    optimizer: Any,
    optimizer_variables: Any,
    grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """As `apply`, of values."""
    apply_to = functools.partial(original, optimizer, optimizer_variables)
    if step.flags.in_optimizer:
        return apply_to(grads, *args, **kwargs)
    variables = _known_variables(optimizer)
    grads = _reduce_gradients(step, optimizer, grads, variables)
    with step.flag("in_optimizer"):
        result = apply_to(grads, *args, **kwargs)
    step.notes.equal.update(jax.tree.leaves(result))
    return result


def _known_variables(optimizer: Any) -> Any:
    return getattr(optimizer, "_trainable_variables", [])


def _apply_purely(
    optimizer: Any, grads: list[Any], variables: list[keras.Variable]
) -> None:
    """`apply` by way of `stateless_apply`.

    LossScaleOptimizer's own writes variables inside of a branch, which no
    trace of JAX allows (keras 3.15).
    """
    if not optimizer.built:
        optimizer.build(variables)
    slots = optimizer.variables
    new = optimizer.stateless_apply(
        [v.value for v in slots], grads, [v.value for v in variables]
    )
    for group, values in zip((variables, slots), new, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def _reduce_gradients(
    step: StepContext, optimizer: Any, grads: Any, variables: Any
) -> list[Any]:
    grads = list(grads)
    if step.is_empty:
        grads = [g if g is None else _without_nan(g) for g in grads]
    overwriting = [
        getattr(v, "overwrite_with_gradient", False) for v in variables
    ]
    overwriting += [False] * (len(grads) - len(overwriting))
    summed = [
        i for i, g in enumerate(grads) if g is not None and not overwriting[i]
    ]
    sums = all_sum([grads[i] for i in summed], step.axis, step.buffering)
    # A scaled loss was divided by the number of replicas already, so that a
    # replica's gradients overflow where one device's would.
    is_sum = step.facts.is_local or optimizer in step.notes.scaled_losses
    divisor = 1 if is_sum else step.num_replicas
    reduced = list(grads)
    for i, total in zip(summed, sums, strict=True):
        reduced[i] = total if divisor == 1 else total / divisor
    for i, grad in enumerate(grads):
        if grad is not None and overwriting[i]:
            reduced[i] = all_max(grad, step.axis)
    return reduced


def _without_nan(array: Any) -> Any:
    return jnp.where(jnp.isnan(array), jnp.zeros_like(array), array)


def scale_loss(
    step: StepContext, original: _Method, optimizer: Any, loss: Any
) -> Any:
    """The loss as an optimizer scales it, divided by the replicas, too."""
    scales = (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
    )
    if not scales or step.flags.in_scaling or step.facts.is_local:
        return original(optimizer, loss)
    step.notes.scaled_losses.add(optimizer)
    with step.flag("in_scaling"):
        return original(optimizer, loss) / step.num_replicas
