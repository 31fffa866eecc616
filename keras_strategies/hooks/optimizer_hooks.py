"""Changes to optimizers while a step is traced: gradients are reduced.

A call of an optimizer is turned into a pure function of gradients and values,
by running the method that was called in a scope of its own. The new values are
those of the variables that the method writes. What is special to a step wraps
this function: the gradients are reduced over the replicas, the update of
sharded variables is marked, so that the step is cut there, and accumulated
gradients are reduced only in the step of the update (summands.py).

If optimizers are nested, only the outermost one has hooks. So Keras's loss
scaling and gradient accumulation receive reduced gradients.

References:
  - Micikevicius et al., Mixed Precision Training (2018), on loss scaling:
    https://arxiv.org/abs/1710.03740
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._types import Array
from keras_strategies.hooks import loss_hooks, summands
from keras_strategies.hooks.variables_used import InnerScope, chain_scopes
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.marked_updates import (
    MAX,
    is_collecting,
    mark_update,
)
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.identity import IdentitySet
from keras_strategies.spmd.replica_map import all_max, all_sum
from keras_strategies.variables import shardings

_Method = Callable[..., Any]
_PureUpdate = Callable[[list[Any], list[Any]], list[Any]]


def apply(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    *args: Any,
    **kwargs: Any,
) -> object:
    """Reduces gradients over the replicas, then applies the optimizer."""
    given = args[0] if args else kwargs.pop("trainable_variables", None)
    variables = _find_variables(optimizer) if given is None else list(given)
    passed = args if given is None else (variables, *args[1:])
    weights = IdentitySet(variables)
    slots = [v for v in optimizer.variables if v not in weights]
    targets = [*variables, *slots]
    # Other variables that the method writes, such as the states of seeds.
    others: list[keras.Variable] = []
    structure = jax.tree.structure(None)

    def update(grads: list[Any], values: list[Any]) -> list[Any]:
        nonlocal structure
        scope = InnerScope(zip(targets, values, strict=True))
        with chain_scopes(), scope:
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                result = apply_purely(optimizer, grads, variables)
            else:
                result = original(optimizer, grads, *passed, **kwargs)
        known = IdentitySet(targets)
        others[:] = [v for v in scope.written if v not in known]
        new = [scope.get_current_value(v) for v in (*targets, *others)]
        results, structure = jax.tree.flatten(result)
        return [*new, *results]

    values = [v.value for v in targets]
    new = iter(_update(step, optimizer, update, grads, targets, values))
    before = iter(values)
    with step.flag("in_optimizer"):
        for variable, value in zip([*targets, *others], new, strict=False):
            if value is not next(before, None):
                variable.assign(value)
    # Slots that were created just now are equal on all replicas, too.
    created = IdentitySet(others)
    slots = [v for v in optimizer.variables if v in created]
    step.notes.equal.update(v.value for v in slots)
    return jax.tree.unflatten(structure, list(new))


def stateless_apply(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[Array],
    grads: Sequence[Array | None],
    trainable_variables: Sequence[Array],
) -> tuple[Any, ...]:
    """Reduces gradients over the replicas, then calls Keras's method.

    Returns:
      The new weights and the new optimizer variables.
    """
    weights, slots = trainable_variables, optimizer_variables
    count = len(weights)

    def update(grads: list[Any], values: list[Any]) -> list[Any]:
        weights, slots = original(
            optimizer, values[count:], grads, values[:count]
        )
        return [*weights, *slots]

    targets = [*_find_variables(optimizer), *optimizer.variables]
    values = [*weights, *slots]
    new = _update(step, optimizer, update, grads, targets, values)
    return new[:count], new[count:]


def _find_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    return getattr(optimizer, "_trainable_variables", [])


def _update(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    update_all: _PureUpdate,
    grads: Sequence[Array | None],
    targets: list[keras.Variable],
    values: list[Any],
) -> list[Any]:
    """Computes an optimizer's update for the gradients of all replicas.

    Args:
      step: The step that is being traced.
      optimizer: The optimizer.
      update_all: The update as a pure function: it takes reduced gradients and
        the values of `targets`, and returns the new values, followed by those
        of other variables that it writes.
      grads: This replica's gradients; None for a weight without a gradient.
      targets: The weights, in the order of the gradients, followed by the
        slots (the optimizer's own variables).
      values: The values of `targets`.

    Returns:
      What `update_all` returns.
    """
    are_summed = optimizer in step.notes.scaled_losses
    grads = list(grads)
    # If there are too many gradients, Keras's error says so.
    pairs = zip(grads, targets, strict=False)
    present = [i for i, (grad, _) in enumerate(pairs) if grad is not None]
    weights = [targets[i] for i in present]
    received = [grads[i] for i in present]
    received = _receive(step, received, are_summed=are_summed)
    # `scale_loss` has already divided a scaled loss's gradient by the number of
    # replicas. This is done before the other gradients are computed, so that a
    # replica's gradients overflow in the same cases as those on a single
    # device.
    is_sum = step.facts.is_local or are_summed
    divisor = 1 if is_sum else step.num_sharing
    reduce = functools.partial(_reduce, step, weights, divisor)

    def update(received: list[Any], values: list[Any]) -> list[Any]:
        known = dict(zip(present, received, strict=True))
        return update_all([known.get(i) for i in range(len(grads))], values)

    args = (step, optimizer, update, received, weights, targets, values)
    new: list[Any] = []
    with step.flag("in_optimizer"):
        if shardings.any_sharded(targets, step.facts.mesh):
            if is_collecting():
                new = _mark_update(*args, divisor, reduce)
        elif step.facts.sums_later:
            new = summands.accumulate(*args, divisor)
        new = new or update(reduce(received), values)
    for after, before in zip(new, values, strict=False):
        if after is not before:
            # The reduced gradients are equal on all replicas.
            step.notes.equal.add(after)
    return new


def _receive(
    step: StepContext, received: list[Any], *, are_summed: bool
) -> list[Any]:
    """Returns the gradients that are reduced over the replicas.

    A model's step marks them. If this replica has no rows, they are
    zero.

    Args:
      step: The step that is being traced.
      received: The gradients that the optimizer received.
      are_summed: Whether the replicas sum them, and do not average them.
    """
    if not step.facts.is_local:
        name = marks.SHARE if are_summed else marks.GRADIENT
        received = [marks.mark(g, name) for g in received]
    if step.is_empty:
        # In `run` the loss is user-defined and may have gradients even without
        # rows (for example from a regularizer), so only NaN becomes zero.
        empty = _clear_nan if step.facts.is_local else jnp.zeros_like
        received = list(map(empty, received))
    return received


def _clear_nan(array: Array) -> jax.Array:
    return jnp.where(jnp.isnan(array), jnp.zeros_like(array), array)


def _mark_update(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    update: _PureUpdate,
    grads: list[Any],
    weights: list[keras.Variable],
    targets: list[keras.Variable],
    values: list[Any],
    divisor: int,
    reduce: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Computes the update in a single jaxpr equation.

    This equation is later taken out of the program that is mapped over the
    replicas. XLA then computes the update on global, sharded arrays (see
    `marked_updates`).

    Returns:
      The new values of `targets`. Empty if the update writes other variables,
      whose values may differ between the replicas.
    """
    mesh = step.facts.mesh
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    attributes = (*vars(optimizer).values(), *vars(inner).values())
    numbers = [v for v in attributes if isinstance(v, Number)]
    return mark_update(
        update,
        reduce,
        grads,
        values,
        reductions=[
            MAX if _is_overwritten(v) else shardings.get_gradient_spec(v, mesh)
            for v in weights
        ],
        specs=[shardings.get_spec(v, mesh) for v in targets],
        divisor=divisor,
        key=[*weights, *targets, optimizer, *numbers],
    )


def apply_purely(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[keras.Variable],
) -> None:
    """Applies gradients to variables through `stateless_apply`.

    `LossScaleOptimizer.apply` (Keras 3.15) writes variables inside a branch,
    which JAX does not allow in a trace.
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


def _reduce(
    step: StepContext,
    weights: Sequence[keras.Variable],
    divisor: int,
    grads: list[Any],
) -> list[Any]:
    """Reduces gradients over the replicas.

    Args:
      step: The step that is being traced.
      weights: The variables of the gradients.
      divisor: The number by which the sum of the gradients is divided.
      grads: This replica's gradients.
    """
    overwritten = {i for i, v in enumerate(weights) if _is_overwritten(v)}
    summed = [i for i in range(len(grads)) if i not in overwritten]
    mesh, sent = step.facts.mesh, [grads[i] for i in summed]
    sums = all_sum(sent, step.axis, mesh.reduce_dtype)
    if mesh.platform == "gpu":
        # The updates wait until all gradients are summed. Otherwise XLA fuses a
        # weight's update with the weight's cast that the backward pass reads.
        # The gradients of the layers before it are then computed after the sum
        # of this weight's gradient, so that the sums can neither be combined
        # nor overlap with the backward pass (docs/upstream.md).
        sums = jax.lax.optimization_barrier(sums)
    reduced = list(grads)
    for i, total in zip(summed, sums, strict=True):
        reduced[i] = total if divisor == 1 else total / divisor
    for i in overwritten:
        reduced[i] = all_max(grads[i], step.axis)
    return reduced


def _is_overwritten(variable: keras.Variable) -> bool:
    """Returns whether a variable's "gradient" is the variable's new value.

    Keras uses such variables for the scales in float8 training.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def scale_loss(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    loss: Array,
) -> Array:
    """Scales a loss by the optimizer's `scale_loss`.

    If the optimizer scales losses, or has variables whose "gradient" is their
    new value, the loss's gradient is also divided by the number of replicas,
    and the gradients are later summed instead of averaged.

    Returns:
      The scaled loss, a scalar, which the step may return for the logs.
    """
    if not step.flags.in_scaling:
        loss = loss_hooks.mark_loss(step, loss)
    scales = (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
        or any(map(_is_overwritten, _find_variables(optimizer)))
    )
    if not scales or step.flags.in_scaling or step.facts.is_local:
        return original(optimizer, loss)
    step.notes.scaled_losses.add(optimizer)
    with step.flag("in_scaling"):
        scaled = original(optimizer, loss)
    # A replica's share of the gradient grows with its rows.
    count = step.num_sharing / step.facts.growth
    return loss_hooks.divide_gradient(scaled, count)
