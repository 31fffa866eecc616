"""Changes to optimizers while a step is traced: gradients of all replicas.

Loss scaling and gradient accumulation are Keras's own, on reduced gradients.

References:
  - Micikevicius et al., Mixed Precision Training (2018), on loss scaling:
    https://arxiv.org/abs/1710.03740
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._core.identity import IdentitySet
from keras_strategies._core.jaxprs.marked_updates import (
    MAX,
    Reduction,
    is_collecting,
    marked_update,
)
from keras_strategies._core.replica_map import all_max, all_sum
from keras_strategies._types import Array
from keras_strategies.keras_bridge.hooks import loss_hooks
from keras_strategies.keras_bridge.hooks.variables_used import (
    InnerScope,
    scopes_ask_outwards,
)
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.keras_bridge.variables import shardings

_Method = Callable[..., Any]


def apply(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    *args: Any,
    **kwargs: Any,
) -> object:
    """Reduces the gradients, then lets the optimizer apply them."""
    if step.flags.in_optimizer:
        return original(optimizer, grads, *args, **kwargs)
    variables = args[0] if args else kwargs.get("trainable_variables")
    if variables is None:
        variables = _known_variables(optimizer)
    if _is_cut(step, optimizer, variables):
        _apply_in_cut(step, original, optimizer, grads, list(variables))
        return None
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
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[Array],
    grads: Sequence[Array | None],
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """As `apply`, of values."""
    apply_to = functools.partial(original, optimizer, optimizer_variables)
    if step.flags.in_optimizer:
        return apply_to(grads, *args, **kwargs)
    variables = _known_variables(optimizer)
    if _is_cut(step, optimizer, variables):
        weights = args[0] if args else kwargs["trainable_variables"]
        count = len(variables)

        def update(grads: list[Any], values: list[Any]) -> list[Any]:
            apply_to = functools.partial(original, optimizer, values[count:])
            weights, slots = apply_to(grads, values[:count])
            return [*weights, *slots]

        held = [*variables, *optimizer.variables]
        values = [*weights, *optimizer_variables]
        new = _updated(step, optimizer, grads, held, values, update)
        step.notes.equal.update(new)
        return new[:count], new[count:]
    grads = _reduce_gradients(step, optimizer, grads, variables)
    with step.flag("in_optimizer"):
        result = apply_to(grads, *args, **kwargs)
    step.notes.equal.update(jax.tree.leaves(result))
    return result


def _known_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    return getattr(optimizer, "_trainable_variables", [])


def _is_cut(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> bool:
    """Whether the step is cut at this update: its variables are divided."""
    held = [*variables, *optimizer.variables]
    if not shardings.any_sharded(held, step.facts.mesh):
        return False
    if not is_collecting():
        shardings.note_replicated_update(held)
        return False
    return True


def _apply_in_cut(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    variables: list[keras.Variable],
) -> None:
    """`apply` in a step that is cut at it."""
    weights = IdentitySet(variables)
    slots = [v for v in optimizer.variables if v not in weights]
    held = [*variables, *slots]

    def update(grads: list[Any], values: list[Any]) -> list[Any]:
        scope = InnerScope(list(zip(held, values, strict=True)))
        with scopes_ask_outwards(), scope:
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                _apply_purely(optimizer, grads, variables)
            else:
                original(optimizer, grads, variables)
        return [scope.get_current_value(v) for v in held]

    values = [v.value for v in held]
    new = _updated(step, optimizer, grads, held, values, update)
    with step.flag("in_optimizer"):
        for variable, value in zip(held, new, strict=True):
            variable.assign(value)
    step.notes.equal.update(v.value for v in held)


def _updated(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    held: list[keras.Variable],
    values: list[Any],
    update: Callable[[list[Any], list[Any]], list[Any]],
) -> list[Any]:
    """The new values of weights and slots, as an equation to cut at.

    Args:
      step: The step that is traced.
      optimizer: The optimizer.
      grads: This replica's gradients; None where there is none.
      held: The weights, in the gradients' order, then the slots.
      values: Their values.
      update: The optimizer's update: of reduced gradients and values.
    """
    mesh = step.facts.mesh
    grads = _of_rows(step, grads)
    present = [i for i, g in enumerate(grads) if g is not None]

    def every(given: list[Any]) -> list[Any]:
        found = dict(zip(present, given, strict=True))
        return [found.get(i) for i in range(len(grads))]

    def reduce(given: list[Any]) -> list[Any]:
        reduced = _reduce_gradients(step, optimizer, every(given), held)
        return [reduced[i] for i in present]

    def reduction(variable: keras.Variable) -> Reduction:
        is_largest = _is_overwritten(variable)
        return MAX if is_largest else shardings.gradient_spec_of(variable, mesh)

    with step.flag("in_optimizer"):
        return marked_update(
            lambda given, values: update(every(given), values),
            reduce,
            [grads[i] for i in present],
            values,
            reductions=[reduction(held[i]) for i in present],
            specs=[shardings.spec_of(v, mesh) for v in held],
            divisor=_divisor(step, optimizer),
            on_replicated=lambda: shardings.note_replicated_update(held),
        )


def _divisor(step: StepContext, optimizer: keras.optimizers.Optimizer) -> int:
    """What the sum of the replicas' gradients is divided by.

    A scaled loss was divided by the number of replicas already, so that a
    replica's gradients overflow where one device's would.
    """
    is_sum = step.facts.is_local or optimizer in step.notes.scaled_losses
    return 1 if is_sum else step.num_sharing


def _apply_purely(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[keras.Variable],
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
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    variables: Sequence[keras.Variable],
) -> list[Any]:
    grads = _of_rows(step, grads)
    overwriting = list(map(_is_overwritten, variables))
    overwriting += [False] * (len(grads) - len(overwriting))
    summed = [
        i for i, g in enumerate(grads) if g is not None and not overwriting[i]
    ]
    sums = all_sum([grads[i] for i in summed], step.axis, step.buffering)
    divisor = _divisor(step, optimizer)
    reduced = list(grads)
    for i, total in zip(summed, sums, strict=True):
        reduced[i] = total if divisor == 1 else total / divisor
    for i, grad in enumerate(grads):
        if grad is not None and overwriting[i]:
            reduced[i] = all_max(grad, step.axis)
    return reduced


def _of_rows(step: StepContext, grads: Sequence[Array | None]) -> list[Any]:
    """Gradients, of which a replica without rows has none."""
    if not step.is_empty:
        return list(grads)
    # In `run` a replica's loss is what its author says.
    empty = _without_nan if step.facts.is_local else jnp.zeros_like
    return [grad if grad is None else empty(grad) for grad in grads]


def _without_nan(array: Array) -> jax.Array:
    return jnp.where(jnp.isnan(array), jnp.zeros_like(array), array)


def _is_overwritten(variable: keras.Variable) -> bool:
    """Whether a gradient takes a variable's place, as float8's scales."""
    return getattr(variable, "overwrite_with_gradient", False)


def scale_loss(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    loss: Array,
) -> Array:
    """The loss as an optimizer scales it, divided by the replicas, too.

    Returns:
      A scalar.
    """
    if not step.flags.in_scaling:
        loss = loss_hooks.mark_loss(step, loss)
    scales = (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
        or any(map(_is_overwritten, _known_variables(optimizer)))
    )
    if not scales or step.flags.in_scaling or step.facts.is_local:
        return original(optimizer, loss)
    step.notes.scaled_losses.add(optimizer)
    with step.flag("in_scaling"):
        return original(optimizer, loss) / step.num_sharing
