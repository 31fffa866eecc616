"""Changes to metrics while a step is traced; installed by trace_hooks.py."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._types import Tree
from keras_strategies.hooks import (
    gather_rows,
    loss_hooks,
    metric_rules,
)
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks.variables_used import InnerScope
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.spmd.identity import IdentitySet
from keras_strategies.spmd.replica_map import all_concatenate

Method = Callable[..., Any]


def update_compiled(
    step: StepContext,
    original: Method,
    metrics: keras.metrics.Metric,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Updates the metrics passed to `compile`, with `in_compiled` set."""
    with step.flag("in_compiled"):
        return original(metrics, *args, **kwargs)


def update_state(
    step: StepContext,
    original: Method,
    metric: keras.metrics.Metric,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Updates a metric with this replica's rows or with all replicas' rows.

    Which of them depends on the rule that `metric_rules` chooses for the
    metric.
    """
    if step.flags.in_metric:
        return original(metric, *args, **kwargs)
    if args:
        # A `Mean` treats a scalar as a mean over this replica's rows.
        value = loss_hooks.mark_loss(step, args[0])
        if metric is step.facts.loss_tracker and step.weight not in (0.0, 1.0):
            # The tracker itself weights the loss by the replica's rows, so the
            # weight that `compute_loss` applied is removed.
            value = value / step.weight
        args = (value, *args[1:])
    update = metric_rules.Update(
        metric=metric, args=args, kwargs=kwargs, num_replicas=step.num_replicas
    )
    if (
        not step.flags.sees_global_batch
        and metric is not step.facts.loss_tracker
    ):
        update.note_sizes(step)
    rule = _choose_rule(step, update)
    for variable in metric.variables:
        step.notes.metric_rules[variable] = rule
    if rule == metric_rules.IN_TURN:
        return _update_in_turn(step, original, update)
    # In `run` the flag `sees_global_batch` is always set.
    is_gathered = step.flags.sees_global_batch and not step.facts.is_local
    if rule == metric_rules.SAME and not is_gathered:
        args, kwargs = gather_rows.gather_all_rows(step, (args, kwargs))
    with step.flag("in_metric"):
        return original(metric, *args, **kwargs)


def _choose_rule(step: StepContext, update: metric_rules.Update) -> str:
    """Returns the rule for an update of a metric.

    All updates of a metric in a step must have the same rule. Otherwise the
    step is traced again with the global batch.
    """
    variables = update.metric.variables
    rules = [step.notes.metric_rules.get(v) for v in variables]
    known = next((r for r in rules if r is not None), None)
    if step.facts.is_local:
        rule = known or update.choose_local_rule()
    elif step.flags.sees_global_batch:
        # The rows are already gathered, so every replica makes the same
        # update.
        rule = metric_rules.SAME
    else:
        rule = update.choose_rule(step.facts.rows)
    if rule == metric_rules.GLOBAL or known not in (None, rule):
        described = metric_rules.describe_metric(update.metric)
        step.demand_global_batch(
            f"{described} is updated either with a value that may be a sum or "
            "a mean over the rows, or with different kinds of values in one "
            "step, such as one value per row and then a mean. Update it with "
            "one value per row, or use `keras.metrics.Mean` for a mean over "
            "the rows"
        )
    return rule


def _update_in_turn(
    step: StepContext, original: Method, update: metric_rules.Update
) -> object:
    """Updates a metric with every replica's scalars, in order of replica id."""
    leaves, structure = jax.tree.flatten((update.args, update.kwargs))
    all_leaves = [
        all_concatenate(jnp.asarray(leaf)[None], step.axis)
        if isinstance(leaf, jax.Array)
        else [leaf] * step.num_replicas
        for leaf in leaves
    ]
    result = None
    with step.flag("in_metric"):
        for replica in range(step.num_replicas):
            scalars = [every[replica] for every in all_leaves]
            args, kwargs = jax.tree.unflatten(structure, scalars)
            result = original(update.metric, *args, **kwargs)
    return result


def reset_state(
    step: StepContext, original: Method, metric: keras.metrics.Metric
) -> object:
    """Resets a metric; later changes are counted from the new state."""
    result = original(metric)
    for variable in metric.variables:
        if variable in step.notes.before:
            step.notes.before[variable] = variable.value
    return result


def result(
    step: StepContext,
    original: Method,
    metric: keras.metrics.Metric,
    *args: Any,
    **kw: Any,
) -> Tree:
    """Computes a metric's result from all replicas' updates so far.

    Returns:
      The return value of the metric's `result`: a scalar, or a dict that maps
      names to scalars.
    """
    variables = metric.variables
    is_known = all(v in step.notes.before for v in variables)
    if step.flags.in_metric or not is_known:
        return original(metric, *args, **kw)
    before = [step.notes.before[v] for v in variables]
    mine = [v.value for v in variables]
    plans = [
        merge_lib.plan_variable(step, variable, old, old, new, True)
        for variable, old, new in zip(variables, before, mine, strict=True)
    ]
    # If the result is only logged, the logged value is computed from the state
    # that the step returns (`step_logs.read_logs`), and the compiler removes
    # these computations as dead code.
    (merged,), _ = merge_lib.combine(step, [plans])
    scope = InnerScope(zip(variables, merged, strict=True))
    with step.flag("in_metric"), scope:
        value = original(metric, *args, **kw)
    mine_alone = IdentitySet(variables)
    reads_others = any(
        v in step.notes.before and v not in mine_alone for v in scope.read
    )
    if len(scope.written) or reads_others:
        described = metric_rules.describe_metric(metric)
        step.demand_global_batch(
            f"the `result` method of {described} reads another metric that is "
            "not one of its attributes, or writes a variable. Make the other "
            "metric an attribute of this one, and write variables only in "
            "`update_state`"
        )
    parts = value.items() if isinstance(value, dict) else [(None, value)]
    for key, part in parts:
        step.notes.results[part] = Result(
            metric=metric, key=key, variables=list(variables), state=mine
        )
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The origin of a value that a metric's `result` returned in a step.

    The value was computed from the rows of all replicas.

    Attributes:
      metric: The metric.
      key: The value's key if the metric returned a dict, else None.
      variables: The metric's variables.
      state: The variables' values on this replica when `result` was called.
    """

    metric: keras.metrics.Metric
    key: str | None
    variables: list[keras.Variable]
    state: list[Any]
