"""Changes to losses, optimizers and variables while a step is traced.

Between the start and the end of a trace, and for the tracing thread alone:
- the outermost optimizer reduces the gradients over the replicas first;
- losses take their denominators over the global batch, and losses that mix
  rows see the rows of all replicas;
- metrics are updated by the rule that fits them (metric_hooks.py).
Classes are wrapped rather than instances, so that every optimizer, loss and
metric is met wherever a model keeps it, and nothing is left on a model.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras import ops
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import (
    CompileLoss,
    CompileMetrics,
    MetricsList,
)

from keras_strategies._core.replica_map import all_max, all_mean, all_sum
from keras_strategies.keras_bridge.hooks import (
    metric_hooks,
    metric_rules,
    variable_writes,
)
from keras_strategies.keras_bridge.hooks.gather_rows import gathered, note_rows
from keras_strategies.keras_bridge.hooks.seeds import next_seed
from keras_strategies.keras_bridge.row_checks.suspect_loss import (
    mean_of,
    share_of_a_sum,
)
from keras_strategies.keras_bridge.step_context import StepContext, current_step

_Method = Callable[..., Any]
_METRIC_LISTS = (CompileMetrics, MetricsList)
_lock = threading.RLock()
_installed: list[tuple[Any, str, Any]] = []
_num_open = 0


@contextlib.contextmanager
def trace_hooks() -> Iterator[None]:
    """Installs the hooks while a block traces a step; restores all after."""
    global _num_open
    with _lock:
        if _num_open == 0:
            _install()
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if _num_open == 0:
                while _installed:
                    owner, name, original = _installed.pop()
                    setattr(owner, name, original)


def _install() -> None:
    _wrap(loss_module, "reduce_values", _reduce_values)
    _wrap(loss_module, "apply_mask", _apply_mask)
    for cls in _classes(keras.losses.Loss):
        if "__call__" in vars(cls):
            _wrap(cls, "__call__", _call_loss)
    for cls in _classes(BaseOptimizer):
        for name, wrapper in (
            ("apply", functools.partial(_apply, position=0)),
            ("stateless_apply", functools.partial(_apply, position=1)),
            ("scale_loss", _scale_loss),
        ):
            if name in vars(cls):
                _wrap(cls, name, wrapper)
    for cls in _classes(keras.metrics.Metric):
        if issubclass(cls, _METRIC_LISTS):
            if "update_state" in vars(cls):
                _wrap(cls, "update_state", metric_hooks.update_compiled)
            continue
        for name, wrapper in (
            ("update_state", metric_hooks.update_state),
            ("reset_state", metric_hooks.reset_state),
            ("result", metric_hooks.result),
        ):
            if name in vars(cls):
                _wrap(cls, name, wrapper)

    _wrap(keras.random.SeedGenerator, "next", next_seed)
    for name in ("assign", "assign_add", "assign_sub"):
        _wrap(KerasVariable, name, variable_writes.assign)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return original(*args, **kwargs)
        return wrapper(step, original, *args, **kwargs)

    _installed.append((owner, name, original))
    setattr(owner, name, hooked)


def _classes(base: type) -> list[type]:
    found = {base: None}
    for cls in base.__subclasses__():
        found |= dict.fromkeys(_classes(cls))
    return list(found)


# Optimizers.


def _apply(
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


def _scale_loss(
    step: StepContext, original: _Method, optimizer: Any, loss: Any
) -> Any:
    scales = (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
    )
    if not scales or step.flags.in_scaling or step.facts.is_local:
        return original(optimizer, loss)
    step.notes.scaled_losses.add(optimizer)
    with step.flag("in_scaling"):
        return original(optimizer, loss) / step.num_replicas


# Losses. A replica's loss is such that the mean over the replicas is the
# global loss, and so is the mean of their gradients.


def _reduce_values(
    step: StepContext,
    original: _Method,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
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


def _apply_mask(
    step: StepContext,
    original: _Method,
    sample_weight: Any,
    mask: Any,
    dtype: Any,
    reduction: str | None,
) -> Any:
    if (
        mask is None
        or step.flags.is_whole
        or step.flags.in_metric
        or reduction not in ("mean", "sum_over_batch_size")
    ):
        return original(
            sample_weight, mask=mask, dtype=dtype, reduction=reduction
        )
    # Keras gives each kept entry the weight total / kept, of its own rows;
    # dividing by the mean of `kept` over the replicas makes it the batch's.
    weighted = original(
        sample_weight, mask=mask, dtype=dtype, reduction=reduction
    )
    kept = jnp.sum(jnp.asarray(mask, dtype=weighted.dtype))
    mean_kept = all_mean(kept, step.axis)
    return weighted * ops.divide_no_nan(kept, mean_kept)


def _call_loss(
    step: StepContext,
    original: _Method,
    loss: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
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
