"""Changes to optimizers while a step is traced: gradients of all replicas.

Loss scaling and gradient accumulation are Keras's own, on reduced gradients.

References:
  - Micikevicius et al., Mixed Precision Training (2018), on loss scaling:
    https://arxiv.org/abs/1710.03740
"""

from collections.abc import Callable
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
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import all_max, all_sum
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
    optimizer: Any,
    *args: Any,
    position: int,
    **kwargs: Any,
) -> Any:
    """Reduces the gradients, then lets the optimizer apply them."""
    if step.flags.in_optimizer:
        return original(optimizer, *args, **kwargs)
    args_list = list(args)
    if len(args_list) > position:
        grads = args_list[position]
    else:
        grads = kwargs["grads"]
    variables = None
    if position == 0:
        variables = kwargs.get("trainable_variables")
        if len(args_list) > 1:
            variables = args_list[1]
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", [])
    if is_collecting() and shardings.divides(
        [*variables, *optimizer.variables], step.facts.mesh
    ):
        return _apply_marked(
            step,
            original,
            optimizer,
            list(grads),
            list(variables),
            args_list if position else None,
        )
    reduced = _reduce_gradients(step, optimizer, list(grads), list(variables))
    if len(args_list) > position:
        args_list[position] = reduced
    else:
        kwargs["grads"] = reduced
    with step.flag("in_optimizer"):
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if step.facts.is_local and is_scaling and position == 0:
            result = _apply_purely(optimizer, reduced, list(variables))
        else:
            result = original(optimizer, *args_list, **kwargs)
    applied = jax.tree.leaves(result)
    if position == 0:
        applied = [v.value for v in (*variables, *optimizer.variables)]
    # Equal on all replicas, as the gradients were.
    step.notes.equal.update(applied)
    return result


def _apply_marked(
    step: StepContext,
    original: _Method,
    optimizer: Any,
    grads: list[Any],
    variables: list[keras.Variable],
    stateless: list[Any] | None,
) -> Any:
    """As `apply`, as an equation that a step with divided state is cut at.

    Args:
      step: The step that is traced.
      original: `apply` or `stateless_apply`.
      optimizer: The optimizer.
      grads: This replica's gradients; None where there is none.
      variables: The weights.
      stateless: The arguments of `stateless_apply`; None for `apply`.
    """
    mesh = step.facts.mesh
    own = IdentitySet(variables)
    slots = [v for v in optimizer.variables if stateless or v not in own]
    held = [*variables, *slots]
    if stateless:
        values = [*stateless[2], *stateless[0]]
    else:
        values = [v.value for v in held]
    present = [i for i, g in enumerate(grads) if g is not None]

    def every(given: list[Any]) -> list[Any]:
        found: list[Any] = [None] * len(grads)
        for i, grad in zip(present, given, strict=True):
            found[i] = grad
        return found

    def update(given: list[Any], values: list[Any]) -> list[Any]:
        if stateless:
            weights, rest = values[: len(variables)], values[len(variables) :]
            new = original(optimizer, rest, every(given), weights)
            return [*new[0], *new[1]]
        scope = InnerScope(list(zip(held, values, strict=True)))
        with scopes_ask_outwards(), scope:
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                _apply_purely(optimizer, every(given), variables)
            else:
                original(optimizer, every(given), variables)
        return [scope.get_current_value(v) for v in held]

    def reduce(given: list[Any]) -> list[Any]:
        reduced = _reduce_gradients(step, optimizer, every(given), variables)
        return [reduced[i] for i in present]

    with step.flag("in_optimizer"):
        new = marked_update(
            update,
            reduce,
            [grads[i] for i in present],
            values,
            reductions=[_reduction(variables[i], mesh) for i in present],
            specs=[shardings.spec_of(v, mesh) for v in held],
            divisor=_divisor(step, optimizer),
        )
        if not stateless:
            for variable, value in zip(held, new, strict=True):
                variable.assign(value)
            new = [v.value for v in held]
    step.notes.equal.update(new)
    if not stateless:
        return None
    return new[: len(variables)], new[len(variables) :]


def _reduction(variable: keras.Variable, mesh: ReplicaMesh) -> Reduction:
    if getattr(variable, "overwrite_with_gradient", False):
        return MAX
    return shardings.gradient_spec_of(variable, mesh)


def _divisor(step: StepContext, optimizer: Any) -> int:
    """What the sum of the replicas' gradients is divided by.

    A scaled loss was divided by the number of replicas already, so that a
    replica's gradients overflow where one device's would.
    """
    is_sum = step.facts.is_local or optimizer in step.notes.scaled_losses
    return 1 if is_sum else step.num_replicas


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
    step: StepContext, optimizer: Any, grads: list[Any], variables: list[Any]
) -> list[Any]:
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
    divisor = _divisor(step, optimizer)
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
