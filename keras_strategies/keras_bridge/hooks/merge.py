"""The merge of the replicas' states: one value for all of each variable."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._core.replica_map import (
    all_max,
    all_min,
    all_sum,
    as_number,
    of_first,
)
from keras_strategies._types import Array
from keras_strategies.keras_bridge.hooks import metric_rules
from keras_strategies.keras_bridge.hooks.seeds import is_seed
from keras_strategies.keras_bridge.step_context import Group, StepContext

MERGE_RULES = ("mean", "sum", "max", "min", "any", "all", "first")


def merge(variable: keras.Variable, rule: str) -> keras.Variable:
    """Says how a variable that a step writes is merged over the replicas.

    By default floating-point state (moving statistics) is averaged, integer
    and boolean state is replica 0's, metrics are summed up. Call it where
    that is not what the variable means: a counter of rows, a maximum.

    Args:
      variable: The variable; typically made by `layer.add_weight`.
      rule: `"mean"`, `"sum"` (what the replicas added is added up), `"max"`,
        `"min"`, `"any"`, `"all"` (booleans) or `"first"` (replica 0's).

    Returns:
      The variable, for use in an assignment.

    Raises:
      ValueError: an unknown rule.
      TypeError: not a variable.

    Example:
      ```python
      class Counted(keras.layers.Layer):
          def build(self, shape):
              rows_seen = self.add_weight(dtype="int32", trainable=False)
              self.rows_seen = ks.merge(rows_seen, "sum")

          def call(self, x):
              self.rows_seen.assign_add(keras.ops.shape(x)[0])
              return x
      ```
    """
    if not isinstance(variable, keras.Variable):
        raise TypeError(
            "`merge` takes a Keras variable. Received: "
            f"{type(variable).__name__}. Pass what `add_weight` returned."
        )
    if rule not in MERGE_RULES:
        raise ValueError(
            "A variable is merged by one of the known rules. Received: "
            f"rule={rule!r}. Choose from {', '.join(MERGE_RULES)}."
        )
    variable._ks_merge = rule
    return variable


@dataclasses.dataclass(kw_only=True)
class Merge:
    """Collects what a step changed and reduces all of it at once.

    Attributes:
      step: The step that is traced.
      summands: What is to be summed over the replicas, by place.
    """

    step: StepContext
    summands: list[Any] = dataclasses.field(default_factory=list)

    def add(self, value: Array) -> int:
        """Takes an array to be summed over the replicas; returns its place."""
        self.summands.append(value)
        return len(self.summands) - 1

    def sums(self) -> list[Any]:
        """The sums, by place."""
        return all_sum(self.summands, self.step.axis, self.step.buffering)


def plan_merge(
    plan: Merge,
    variables: Sequence[keras.Variable],
    old: Group,
    folded: Group,
    new: Group,
    *,
    are_metrics: bool = False,
) -> Callable[[list[Any]], Group]:
    """Plans the merge of one group of variables.

    Args:
      plan: Where the summands go.
      variables: The variables of the group.
      old: Their values before the step.
      folded: As `old`, with the seeds that the replica used.
      new: Their values after the step on this replica.
      are_metrics: Whether what the replicas added is added up by default.

    Returns:
      A function of the plan's sums that returns the merged values.
    """
    finishers = [
        _finisher(plan, *of_variable, are_metrics)
        for of_variable in zip(variables, old, folded, new, strict=True)
    ]

    def finish(sums: list[Any]) -> Group:
        return [
            as_type_of(finisher(sums), o)
            for finisher, o in zip(finishers, old, strict=True)
        ]

    return finish


def _finisher(
    plan: Merge,
    variable: keras.Variable,
    old: Array,
    folded: Array,
    new: Array | None,
    is_metric: bool,
) -> Callable[[list[Any]], Any]:
    step = plan.step
    if new is folded or new is old or new is None:
        return lambda sums: old
    is_float = keras.backend.is_float_dtype(str(new.dtype))
    if new in step.notes.equal and not (step.facts.is_uneven and is_float):
        return lambda sums: new
    if new in step.notes.equal:
        # Computed alike, but in branches that the compiler may round in
        # different ways.
        return _of_first(plan, new)
    if is_seed(variable):
        # Every replica drew as often, or the next draws are those after the
        # most; the stream's own seed stays.
        drawn = all_max(new[1], step.axis) if step.facts.is_uneven else new[1]
        return lambda sums: jnp.stack([old[0], drawn])
    rule = _rule(variable, step, is_metric)
    return _by_rule(plan, rule, old, new, is_metric)


def _by_rule(
    plan: Merge, rule: str, old: Array, new: Array, is_metric: bool
) -> Callable[[list[Any]], Any]:
    step = plan.step
    if rule in (metric_rules.SAME, metric_rules.IN_TURN):
        return lambda sums: new
    number = as_number(new)
    if rule in ("max", "any"):
        largest = all_max(number, step.axis)
        return lambda sums: largest
    if rule in ("min", "all"):
        smallest = all_min(number, step.axis)
        return lambda sums: smallest
    if rule == "sum":
        place = plan.add(new - old)
        return lambda sums: old + sums[place]
    if rule == metric_rules.MEAN and is_metric:
        place = plan.add(share_of_mean(new - old, step))
        return lambda sums: old + sums[place]
    if rule == "mean":
        place = plan.add(share_of_mean(new, step))
        return lambda sums: sums[place]
    return _of_first(plan, number)


def _of_first(plan: Merge, value: Array) -> Callable[[list[Any]], Any]:
    """Replica 0's value, for all."""
    place = plan.add(of_first(value, plan.step.axis))
    return lambda sums: sums[place]


def share_of_mean(value: Array, step: StepContext) -> Array:
    """Returns this replica's part of the average over the replicas.

    Returns:
      An array of the value's shape; the replicas' sum is the average.
    """
    if step.facts.share is None:
        return value / step.num_replicas
    share = jnp.asarray(step.facts.share, value.dtype)
    # Statistics of no rows are no numbers.
    return jnp.where(share > 0, value * share, jnp.zeros_like(value))


def _rule(variable: keras.Variable, step: StepContext, is_metric: bool) -> str:
    chosen = getattr(variable, "_ks_merge", None)
    if chosen is not None:
        return chosen
    if is_metric:
        return step.notes.metric_rules.get(variable) or metric_rules.SUM
    if variable.aggregation == "sum":
        return "sum"
    if variable.aggregation == "only_first_replica":
        return "first"
    floating = keras.backend.is_float_dtype(str(variable.dtype))
    return "mean" if floating else "first"


def as_type_of(new: Array, old: Array) -> jax.Array:
    """`new` with the dtype of `old`, so that no step changes a type."""
    return jax.lax.convert_element_type(jnp.asarray(new), old.dtype)


def with_changes(group: Group, changes: dict[str, Any]) -> Group:
    """The group with what `changed_values` found of a later one."""
    group = list(group)
    for k, value in changes.items():
        group[int(k)] = value
    return group


def changed_values(old: list[Any], new: Group) -> dict[str, Any]:
    """The values that a step replaced, by their position in the group."""
    return {
        str(k): as_type_of(n, o)
        for k, (o, n) in enumerate(zip(old, new, strict=True))
        if n is not o and n is not None
    }
