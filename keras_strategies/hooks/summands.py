"""Accumulation of gradients that are summed over the replicas once per update.

With `gradient_accumulation_steps=K`, a Keras optimizer adds up the gradients of
K steps before it updates the weights. Each replica adds up its own gradients,
and their sums are reduced over the replicas in the step of the update. The
optimizer then receives the accumulated sum in its accumulators, and zeros as
the gradients. So clipping, weight decay, moments and moving averages see the
same numbers as if each step reduced its gradients.

In the trace, the values of accumulators are summands: those from before the
step, and one that is marked for each call of an optimizer. A summand may only
be added to by an optimizer, or be the new value of an accumulator. If it is
used in any other way, as a log for example (`are_used_as_sums`), the step must
be traced again with accumulators that are sums in every step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.passes import stages
from keras_strategies.spmd.identity import IdentityMap, IdentitySet
from keras_strategies.spmd.replica_map import (
    all_min,
    as_number,
    sum_if,
)

_MARK = "ks_summand"


def begin(step: StepContext, places: Sequence[int], values: Group) -> None:
    """Begins a step whose accumulators have this replica's summands.

    Args:
      step: The step that is being traced.
      places: The indices of the accumulators among the optimizer's variables.
      values: The values of the optimizer's variables in the trace.
    """
    for i, value in enumerate(values):
        (step.notes.summands if i in places else step.notes.equal).add(value)


def accumulate(
    step: StepContext,
    optimizer: keras.optimizers.Optimizer,
    update: Callable[[list[Any], list[Any]], list[Any]],
    grads: Sequence[Array],
    weights: Sequence[keras.Variable],
    targets: Sequence[keras.Variable],
    values: Group,
    divisor: int,
) -> list[Any]:
    """Adds gradients to the accumulators, and sums them if this is an update.

    It is for steps that sum accumulated gradients later (`StepFacts`). The
    optimizer's update then receives zeros as the gradients. If a replica's
    gradients are not finite and the loss is scaled, the first of them is NaN,
    so that the optimizer skips the step.

    Args:
      step: The step that is being traced.
      optimizer: The outermost optimizer.
      update: Its update, a function of gradients and of the values of
        `targets`, which returns new values.
      grads: This replica's gradients.
      weights: The weights of the gradients.
      targets: All weights, followed by the optimizer's variables.
      values: The values of `targets` in the trace.
      divisor: The number by which the sum of the gradients is divided.

    Returns:
      The new values. Accumulators are marked as summands. Empty if
      the accumulators are sums, or the gradients cannot be added to them. In
      the latter case the optimizer uses summands as sums.
    """
    accumulators = IdentitySet(list_accumulators(optimizer))
    if not len(accumulators):
        return []
    before = IdentityMap(zip(targets, values, strict=False))
    are_summands = all(before[v] in step.notes.summands for v in accumulators)
    # Replicas that disagree on whether to sum would wait forever.
    is_counting = before[unwrap(optimizer)._iterations] in step.notes.equal
    used = _find_accumulators(optimizer, grads, weights)
    if not (are_summands and is_counting and used is not None):
        return []
    sums, zeros = _add_gradients(step, optimizer, grads, before, used, divisor)
    summed = IdentityMap(zip(used, sums, strict=True))

    def read(variable: keras.Variable) -> Array:
        if variable in summed:
            return summed[variable]
        if variable in accumulators:
            # The optimizer does not use it, for a weight without a gradient.
            return jnp.zeros(variable.shape, variable.dtype)
        return before[variable]

    def write(variable: keras.Variable, after: Array) -> Array:
        if variable in summed:
            after = checkpoint_name(after, _MARK)
            step.notes.summands.add(after)
        elif variable in accumulators:
            after = before[variable]
        return after

    results = update(zeros, list(map(read, targets)))
    return [*map(write, targets, results), *results[len(targets) :]]


def are_used_as_sums(
    jaxpr: ClosedJaxpr, places: Sequence[int], count: int
) -> bool:
    """Returns whether a step uses summands in another way than to add to them.

    Args:
      jaxpr: The traced step. Its first inputs and its last outputs are the
        state.
      places: The positions of the accumulators in the state.
      count: The number of arrays of the state.
    """
    traced = jaxpr.jaxpr
    found = {traced.invars[place] for place in places}
    for equation in traced.eqns:
        name = equation.params.get("name")
        is_used = not found.isdisjoint(stages.variables(equation.invars))
        if name == _MARK:
            found.update(equation.outvars)
        elif is_used and name != stages.SUM_IF:
            return True
    start = len(traced.outvars) - count
    allowed = {start + place for place in places}
    return any(
        (not found.isdisjoint(stages.variables([output]))) != (i in allowed)
        for i, output in enumerate(traced.outvars)
    )


def list_accumulators(optimizer: Any) -> list[keras.Variable]:
    """Returns the accumulators of an optimizer, in the order of its weights."""
    inner = unwrap(optimizer)
    return list(getattr(inner, "_accumulated_gradients", None) or ())


def unwrap(optimizer: Any) -> Any:
    """Unwraps an optimizer.

    Returns:
      The optimizer inside of one that scales the loss, or the optimizer itself.
    """
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaling else optimizer


def _add_gradients(
    step: StepContext,
    optimizer: Any,
    grads: Sequence[Any],
    before: IdentityMap[Any],
    accumulators: Sequence[keras.Variable],
    divisor: int,
) -> tuple[list[Any], list[Any]]:
    """Adds gradients to accumulators, and sums them if this is an update.

    Returns:
      The values of the gradients' accumulators that the optimizer must read,
      and its gradients, which are zeros or a NaN.
    """
    inner = unwrap(optimizer)
    scale, finite = inner.loss_scale_factor, None
    if inner is not optimizer:
        scale = before[optimizer.dynamic_scale]
        finite = _are_finite(step, grads)

    def add(old: list[Any], new: list[Any]) -> list[Any]:
        parts = [_take_part(n, divisor, scale, finite) for n in new]
        return [o + part for o, part in zip(old, parts, strict=True)]

    old = [before[v] for v in accumulators]
    count = before[inner._iterations] + 1
    is_update = count % inner.gradient_accumulation_steps == 0
    if finite is not None:
        is_update = jnp.logical_and(is_update, finite)
    dtype = step.facts.mesh.reduce_dtype
    if scale is not None and dtype == "float16":
        # Accumulators are not scaled: float16 would make small ones zero, and
        # large ones infinite after the optimizer's check.
        dtype = None
    sums = sum_if(is_update, add, (old, list(grads)), step.axis, dtype)
    zeros = list(map(jnp.zeros_like, grads))
    if finite is not None:
        zeros[0] = jnp.where(finite, zeros[0], jnp.nan)
    return sums, zeros


def _find_accumulators(
    optimizer: Any,
    grads: Sequence[Array],
    weights: Sequence[keras.Variable],
) -> list[keras.Variable] | None:
    """Finds the accumulators of weights.

    Args:
      optimizer: The optimizer.
      grads: The gradients.
      weights: Their weights.

    Returns:
      The accumulators, or None if the gradients cannot be added to them.
    """
    inner = unwrap(optimizer)
    accumulators: list[Any] = list_accumulators(inner)
    used = [accumulators[inner._get_variable_index(w)] for w in weights]
    is_same = all(
        (grad.shape, str(grad.dtype)) == (tuple(target.shape), target.dtype)
        for grad, target in zip(grads, used, strict=True)
    )
    is_same &= len(IdentitySet(used)) == len(used)
    return used if is_same else None


def _are_finite(step: StepContext, grads: Sequence[Any]) -> jax.Array:
    """Returns whether the gradients of all replicas are finite."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
    return all_min(as_number(finite), step.axis) > 0


def _take_part(
    grad: jax.Array, divisor: int, scale: Any, finite: jax.Array | None
) -> jax.Array:
    """Returns a replica's part of the gradient that an optimizer accumulates.

    Args:
      grad: The replica's gradient.
      divisor: The number by which the sum of the gradients is divided.
      scale: The factor of a scaled loss, or None.
      finite: Whether all gradients are finite, if only such gradients count.
    """
    part = grad if divisor == 1 else grad / divisor
    part = part if scale is None else part / jnp.asarray(scale, part.dtype)
    if finite is not None:
        part = jnp.where(finite, part, jnp.zeros_like(part))
    return part
