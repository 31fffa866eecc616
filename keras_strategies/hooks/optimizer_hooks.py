"""Changes to optimizers while a step is traced: gradients are reduced.

If optimizers are nested, the outermost one first reduces the gradients over the
replicas. So Keras's loss scaling and gradient accumulation receive reduced
gradients. In `fit`, accumulated gradients are reduced only in the step of the
update (`accumulation`).

References:
  - Micikevicius et al., Mixed Precision Training (2018), on loss scaling:
    https://arxiv.org/abs/1710.03740
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import keras

from keras_strategies._types import Array
from keras_strategies.hooks import gradients, loss_hooks, summands
from keras_strategies.hooks.variables_used import InnerScope, chain_scopes
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.marked_updates import (
    MAX,
    Reduction,
    is_collecting,
    mark_update,
    wait_for_all,
)
from keras_strategies.spmd.identity import IdentityMap, IdentitySet
from keras_strategies.spmd.replica_map import all_max, all_sum
from keras_strategies.variables import shardings

_Method = Callable[..., Any]


def apply(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    *args: Any,
    **kwargs: Any,
) -> object:
    """Reduces gradients over the replicas, then applies the optimizer."""
    if step.flags.in_optimizer:
        return original(optimizer, grads, *args, **kwargs)
    are_summed = optimizer in step.notes.scaled_losses
    grads = gradients.mark(step, grads, are_summed=are_summed)
    variables = args[0] if args else kwargs.get("trainable_variables")
    if variables is None:
        variables = _find_variables(optimizer)
    if _is_cut(step, optimizer, variables):
        _apply_in_cut(step, original, optimizer, grads, list(variables))
        return None
    before = IdentityMap((v, v.value) for v in optimizer.variables)
    if summands.sums_later(step, optimizer, grads, variables, before):
        _apply_accumulated(
            step, original, optimizer, grads, list(variables), before
        )
        return None
    grads = _reduce_gradients(step, optimizer, grads, variables)
    with step.flag("in_optimizer"):
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if step.facts.is_local and is_scaling:
            result = _apply_purely(optimizer, grads, list(variables))
        else:
            result = original(optimizer, grads, *args, **kwargs)
    # These values are equal on all replicas, because the reduced gradients are
    # equal on all replicas.
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
    """Reduces gradients over the replicas, then calls Keras's method.

    Returns:
      The new weights and the new optimizer variables.
    """
    apply_to = functools.partial(original, optimizer, optimizer_variables)
    if step.flags.in_optimizer:
        return apply_to(grads, *args, **kwargs)
    are_summed = optimizer in step.notes.scaled_losses
    grads = gradients.mark(step, grads, are_summed=are_summed)
    variables = _find_variables(optimizer)
    if _is_cut(step, optimizer, variables):
        weights = args[0] if args else kwargs["trainable_variables"]
        count = len(variables)

        def update(grads: list[Any], values: list[Any]) -> list[Any]:
            apply_to = functools.partial(original, optimizer, values[count:])
            weights, slots = apply_to(grads, values[:count])
            return [*weights, *slots]

        targets = [*variables, *optimizer.variables]
        values = [*weights, *optimizer_variables]
        new = _mark_update(step, optimizer, grads, targets, values, update)
        step.notes.equal.update(new)
        return new[:count], new[count:]
    # Keras's method checks the number of values.
    before = IdentityMap(
        zip(optimizer.variables, optimizer_variables, strict=False)
    )
    if summands.sums_later(step, optimizer, grads, variables, before):
        return _apply_stateless(
            step, original, optimizer, before, grads, args, kwargs
        )
    grads = _reduce_gradients(step, optimizer, grads, variables)
    with step.flag("in_optimizer"):
        result = apply_to(grads, *args, **kwargs)
    step.notes.equal.update(jax.tree.leaves(result))
    return result


def _apply_accumulated(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    variables: list[keras.Variable],
    before: IdentityMap[Any],
) -> None:
    """Applies gradients that are summed only in the step of an update."""
    slots = optimizer.variables
    divisor = _find_divisor(step, optimizer)
    grads, sums = summands.accumulate(
        step, optimizer, grads, variables, before, divisor
    )
    accumulators = summands.accumulators_of(optimizer)
    with step.flag("in_optimizer"):
        for variable in accumulators:
            variable.assign(summands.value_in(sums, variable))
        original(optimizer, grads, variables)
        for variable in accumulators:
            old, new = before[variable], variable.value
            variable.assign(summands.mark(step, sums, variable, old, new))
    step.notes.equal.update(v.value for v in (*variables, *slots))


def _apply_stateless(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    before: IdentityMap[Any],
    grads: Sequence[Array | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[Any], list[Any]]:
    """Does what `_apply_accumulated` does, for `stateless_apply`."""
    slots, variables = optimizer.variables, _find_variables(optimizer)
    divisor = _find_divisor(step, optimizer)
    grads, sums = summands.accumulate(
        step, optimizer, grads, variables, before, divisor
    )
    accumulators = summands.accumulators_of(optimizer)
    values = IdentityMap((v, before[v]) for v in slots)
    for variable in accumulators:
        values[variable] = summands.value_in(sums, variable)
    read = [values[v] for v in slots]
    with step.flag("in_optimizer"):
        weights, new = original(optimizer, read, grads, *args, **kwargs)
    after = IdentityMap(zip(slots, new, strict=True))
    for variable in accumulators:
        after[variable] = summands.mark(
            step, sums, variable, before[variable], after[variable]
        )
    new = [after[v] for v in slots]
    step.notes.equal.update([*weights, *new])
    return list(weights), new


def _find_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    return getattr(optimizer, "_trainable_variables", [])


def _is_cut(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> bool:
    """Returns whether an update is taken out of the mapped program.

    Where possible, an update of sharded variables is taken out of the program
    that is mapped over the replicas. XLA then computes the update on global,
    sharded arrays (see `marked_updates`).
    """
    targets = [*variables, *optimizer.variables]
    if not shardings.any_sharded(targets, step.facts.mesh):
        return False
    if not is_collecting():
        shardings.note_replicated_update(targets)
        return False
    return True


def _apply_in_cut(
    step: StepContext,
    original: _Method,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    variables: list[keras.Variable],
) -> None:
    """Applies gradients; the update is taken out of the mapped program."""
    weights = IdentitySet(variables)
    slots = [v for v in optimizer.variables if v not in weights]
    targets = [*variables, *slots]

    def update(grads: list[Any], values: list[Any]) -> list[Any]:
        scope = InnerScope(list(zip(targets, values, strict=True)))
        with chain_scopes(), scope:
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                _apply_purely(optimizer, grads, variables)
            else:
                original(optimizer, grads, variables)
        return [scope.get_current_value(v) for v in targets]

    values = [v.value for v in targets]
    new = _mark_update(step, optimizer, grads, targets, values, update)
    with step.flag("in_optimizer"):
        for variable, value in zip(targets, new, strict=True):
            variable.assign(value)
    step.notes.equal.update(v.value for v in targets)


def _mark_update(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    targets: list[keras.Variable],
    values: list[Any],
    update: Callable[[list[Any], list[Any]], list[Any]],
) -> list[Any]:
    """Computes the update in a single jaxpr equation.

    This equation is later taken out of the program that is mapped over the
    replicas.

    Args:
      step: The step that is being traced.
      optimizer: The optimizer.
      grads: This replica's gradients; None for a weight without a gradient.
      targets: The weights, in the order of the gradients, followed by the
        slots (the optimizer's own variables).
      values: The values of `targets`.
      update: The optimizer's update: a function that takes reduced gradients
        and values, and returns the new values.

    Returns:
      The new values of `targets`.
    """
    mesh = step.facts.mesh
    grads = gradients.clear_empty(step, grads)
    # The operands of an equation must be arrays. So only gradients that are not
    # None become operands; the function in the equation inserts the Nones.
    present = [i for i, g in enumerate(grads) if g is not None]

    def with_missing(some: list[Any]) -> list[Any]:
        by_index = dict(zip(present, some, strict=True))
        return [by_index.get(i) for i in range(len(grads))]

    def reduce(some: list[Any]) -> list[Any]:
        every = with_missing(some)
        reduced = _reduce_gradients(step, optimizer, every, targets)
        return [reduced[i] for i in present]

    def reduction(variable: keras.Variable) -> Reduction:
        is_largest = _is_overwritten(variable)
        return MAX if is_largest else shardings.gradient_spec_of(variable, mesh)

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    attributes = (*vars(optimizer).values(), *vars(inner).values())
    numbers = [v for v in attributes if isinstance(v, Number)]
    with step.flag("in_optimizer"):
        return mark_update(
            lambda some, values: update(with_missing(some), values),
            reduce,
            [grads[i] for i in present],
            values,
            reductions=[reduction(targets[i]) for i in present],
            specs=[shardings.spec_of(v, mesh) for v in targets],
            divisor=_find_divisor(step, optimizer),
            on_replicated=lambda: shardings.note_replicated_update(targets),
            key=[*(targets[i] for i in present), *targets, optimizer, *numbers],
        )


def _find_divisor(
    step: StepContext, optimizer: keras.optimizers.Optimizer
) -> int:
    """Returns the number by which the sum of the gradients is divided.

    It is 1 for a scaled loss, because `scale_loss` has already divided the
    loss's gradient by the number of replicas. This is done before the other
    gradients are computed, so that a replica's gradients overflow in the same
    cases as the gradients on a single device.
    """
    is_sum = step.facts.is_local or optimizer in step.notes.scaled_losses
    return 1 if is_sum else step.num_sharing


def _apply_purely(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[keras.Variable],
) -> None:
    """Applies gradients through `stateless_apply`.

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


def _reduce_gradients(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Array | None],
    variables: Sequence[keras.Variable],
) -> list[Any]:
    grads = gradients.clear_empty(step, grads)
    overwriting = list(map(_is_overwritten, variables))
    overwriting += [False] * (len(grads) - len(overwriting))
    summed = [
        i for i, g in enumerate(grads) if g is not None and not overwriting[i]
    ]
    mesh, sent = step.facts.mesh, [grads[i] for i in summed]
    sums = all_sum(sent, step.axis, step.buffering, mesh.reduce_dtype)
    sums = wait_for_all(sums, mesh.platform)
    divisor = _find_divisor(step, optimizer)
    reduced = list(grads)
    for i, total in zip(summed, sums, strict=True):
        reduced[i] = total if divisor == 1 else total / divisor
    for i, grad in enumerate(grads):
        if grad is not None and overwriting[i]:
            reduced[i] = all_max(grad, step.axis)
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
    # A trace with the rows of all replicas has the gradient of all of them.
    count = 1 if step.facts.has_all_rows else step.num_sharing
    return loss_hooks.divide_gradient(scaled, count)
