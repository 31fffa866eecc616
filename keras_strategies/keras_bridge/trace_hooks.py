"""What Keras code sees differently while one of our steps is traced.

Between the start and the end of a trace, and for the tracing thread alone:
- the outermost optimizer reduces the gradients over the replicas first;
- losses take their denominators over the global batch, and losses that mix
  rows see the rows of all replicas;
- metrics are updated by the rule that fits them (metric_rules.py).
Classes are wrapped rather than instances, so that every optimizer, loss and
metric is met wherever a model keeps it, and nothing is left on a model.
"""

import contextlib
import dataclasses
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
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from keras_strategies._core.replica_map import all_max, all_mean, all_sum
from keras_strategies._core.step_context import StepContext, current_step
from keras_strategies.keras_bridge import metric_rules, user_variables
from keras_strategies.keras_bridge import state as state_lib
from keras_strategies.keras_bridge.rows import all_gathered, gathered

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
            continue
        for name, wrapper in (
            ("update_state", _update_state),
            ("reset_state", _reset_state),
            ("result", _result),
        ):
            if name in vars(cls):
                _wrap(cls, name, wrapper)

    for name in ("assign", "assign_add", "assign_sub"):
        _wrap(KerasVariable, name, user_variables.assign)


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
    if step.in_optimizer:
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
        if step.is_local and is_scaling and position == 0:
            result = _apply_purely(optimizer, reduced, list(variables))
        else:
            result = original(optimizer, *args_list, **kwargs)
    applied = jax.tree.leaves(result)
    if position == 0:
        applied = [v.value for v in (*variables, *optimizer.variables)]
    # Equal on all replicas, as the gradients were.
    step.equal |= {id(value): value for value in applied}
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
    overwriting = [
        getattr(v, "overwrite_with_gradient", False) for v in variables
    ]
    overwriting += [False] * (len(grads) - len(overwriting))
    summed = [
        i for i, g in enumerate(grads) if g is not None and not overwriting[i]
    ]
    sums = all_sum([grads[i] for i in summed], step.axis, flat=step.flat)
    # A scaled loss was divided by the number of replicas already, so that a
    # replica's gradients overflow where one device's would.
    is_sum = step.is_local or id(optimizer) in step.scaled_losses
    divisor = 1 if is_sum else step.num_replicas
    reduced = list(grads)
    for i, total in zip(summed, sums, strict=True):
        reduced[i] = total if divisor == 1 else total / divisor
    for i, grad in enumerate(grads):
        if grad is not None and overwriting[i]:
            reduced[i] = all_max(grad, step.axis)
    return reduced


def _scale_loss(
    step: StepContext, original: _Method, optimizer: Any, loss: Any
) -> Any:
    scales = (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
    )
    if not scales or step.in_scaling or step.is_local:
        return original(optimizer, loss)
    step.scaled_losses.add(id(optimizer))
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
        step.is_whole
        or step.in_metric
        or reduction in (None, "none")
        or tuple(values.shape) in ((), (0,))
    ):
        return original(values, sample_weight, reduction)
    total = jnp.sum(values)
    if reduction == "sum":
        return total * step.num_replicas
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = jnp.sum(sample_weight).astype(total.dtype)
        return ops.divide_no_nan(total, all_mean(weight, step.axis))
    return original(values, sample_weight, reduction)


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
        or step.is_whole
        or step.in_metric
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
    if step.is_whole or step.in_metric:
        return original(loss, *args, **kwargs)
    if not metric_rules.mixes_rows(loss, metric_rules.rank((args, kwargs))):
        return original(loss, *args, **kwargs)
    args, kwargs = gathered(step, (args, kwargs))
    with step.flag("is_whole"):
        return original(loss, *args, **kwargs)


# Metrics.


def _update_state(
    step: StepContext,
    original: _Method,
    metric: keras.metrics.Metric,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if step.in_metric:
        return original(metric, *args, **kwargs)
    rules = [step.metric_rules.get(id(v)) for v in metric.variables]
    known = next((r for r in rules if r is not None), None)
    if step.is_local:
        rule = known or metric_rules.rule_of_local_update(metric, args, kwargs)
    elif step.is_whole:
        # Of gathered rows: every replica makes the whole batch's update.
        rule = metric_rules.SAME
    else:
        rule = metric_rules.rule_of_update(metric, args, kwargs, step.rows)
    if rule == metric_rules.WHOLE or known not in (None, rule):
        step.demand_whole(
            f"metric {metric.name!r} ({type(metric).__name__}) is updated "
            "with a value without the batch's rows, which may be a sum or a "
            "mean, or with values of several kinds. Update it with rows, or "
            "use `keras.metrics.Mean` for a mean over rows"
        )
    for variable in metric.variables:
        step.metric_rules[id(variable)] = rule
    if rule == metric_rules.SAME and step.is_local:
        args, kwargs = all_gathered(step, (args, kwargs))
    elif rule == metric_rules.SAME and not step.is_whole:
        args, kwargs = gathered(step, (args, kwargs))
    with step.flag("in_metric"):
        return original(metric, *args, **kwargs)


def _reset_state(
    step: StepContext, original: _Method, metric: keras.metrics.Metric
) -> Any:
    result = original(metric)
    for variable in metric.variables:
        if id(variable) in step.before:
            step.before[id(variable)] = variable.value
    return result


def _result(
    step: StepContext, original: _Method, metric: Any, *args: Any, **kw: Any
) -> Any:
    """The result of all replicas' updates so far."""
    variables = metric.variables
    if step.in_metric or any(id(v) not in step.before for v in variables):
        return original(metric, *args, **kw)
    before = [step.before[id(v)] for v in variables]
    mine = [v.value for v in variables]
    plan = state_lib.Merge(step=step)
    finish = state_lib.plan_merge(
        plan, variables, before, before, mine, are_metrics=True
    )
    # Where the result is only logged, it is read from the state that the
    # step returns, and this is dead code (`StepProgram._merged_logs`).
    merged = finish(plan.sums())
    with step.flag("in_metric"):
        try:
            _assign(variables, mine, merged)
            value = original(metric, *args, **kw)
        finally:
            _assign(variables, merged, mine)
    parts = value.items() if isinstance(value, dict) else [(None, value)]
    for key, part in parts:
        step.results[id(part)] = Result(
            value=part,
            metric=metric,
            key=key,
            variables=list(variables),
            state=mine,
        )
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A value that a metric returned in a step, for all replicas' rows.

    Attributes:
      value: The value; held so that its id stays its own.
      metric: The metric.
      key: The value's key where the metric returned a dict, or None.
      variables: The metric's variables.
      state: Their values on this replica at the time.
    """

    value: Any
    metric: keras.metrics.Metric
    key: str | None
    variables: list[keras.Variable]
    state: list[Any]


def _assign(variables: Any, old: list[Any], new: list[Any]) -> None:
    for variable, o, n in zip(variables, old, new, strict=True):
        if n is not o:
            variable.assign(n)
