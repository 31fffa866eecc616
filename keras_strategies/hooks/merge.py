"""Combines the replicas' values of each variable into one value."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._types import Array
from keras_strategies.hooks import metric_rules
from keras_strategies.hooks.seeds import is_seed
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.replica_map import (
    all_max,
    all_min,
    all_sum,
    as_number,
    keep_first,
)

MERGE_RULES = ("mean", "sum", "max", "min", "any", "all", "first")


def merge(variable: keras.Variable, rule: str) -> keras.Variable:
    """Sets how the replicas' values of a variable are combined after a step.

    By default floating-point state (moving statistics) is averaged, integer
    and boolean state is taken from replica 0, and metrics are summed. If user
    code computes a state that is not shown to be a mean over rows, or not to
    depend on them, the step runs over the global batch. Call `merge` for
    variables that need another rule, such as a row counter or a maximum; the
    step then runs replica by replica.

    Args:
      variable: The variable, typically created by `layer.add_weight`.
      rule: One of `"mean"`, `"sum"` (adds the changes of all replicas to the
        old value), `"max"`, `"min"`, `"any"` and `"all"` (for booleans), and
        `"first"` (uses the value of replica 0).

    Returns:
      The variable, for use in an assignment.

    Raises:
      ValueError: if `rule` is unknown.
      TypeError: if `variable` is not a Keras variable.

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
            "`variable` must be a Keras variable. Received: "
            f"{type(variable).__name__}. Pass the variable that `add_weight` "
            "returned."
        )
    if rule not in MERGE_RULES:
        raise ValueError(
            "`rule` must be one of the known rules. Received: "
            f"rule={rule!r}. Choose from {', '.join(MERGE_RULES)}."
        )
    variable._ks_merge = rule
    return variable


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan that combines the replicas' values of a variable into one.

    Attributes:
      old: The variable's value before the step, which has its dtype.
      finish: Computes the new value from the sum of `summand`.
      summand: The array to sum over the replicas; None if the value does not
        need a sum.
    """

    old: Array
    finish: Callable[[Any], Any]
    summand: Any = None


def combine(
    step: StepContext,
    groups: Sequence[Sequence[Plan]],
    summands: Sequence[Any] = (),
) -> tuple[list[Group], list[Any]]:
    """Combines the replicas' values of groups of variables.

    Args:
      step: The step that is being traced.
      groups: The plans of each group's variables.
      summands: Other arrays to sum over the replicas.

    Returns:
      The combined values of each group, and the sums of `summands`.
    """
    arrays = [p.summand for g in groups for p in g if p.summand is not None]
    sums = iter(all_sum([*arrays, *summands], step.axis))

    def compute(plan: Plan) -> Any:
        total = None if plan.summand is None else next(sums)
        return cast_like(plan.finish(total), plan.old)

    merged = [list(map(compute, group)) for group in groups]
    return merged, list(sums)


def plan_variable(
    step: StepContext,
    variable: keras.Variable,
    old: Array,
    folded: Array,
    new: Array | None,
    is_metric: bool,
) -> Plan:
    """Plans how the replicas' values of a variable are combined.

    Args:
      step: The step that is being traced.
      variable: The variable.
      old: The variable's value before the step.
      folded: The same as `old`, except that a random seed is replaced by the
        seed that this replica used.
      new: The variable's value after the step on this replica.
      is_metric: Whether it is a metric's variable, for which the replicas'
        changes are summed by default.
    """
    if new is folded or new is old or new is None:
        return Plan(old, lambda _: old)
    if new in step.notes.equal:
        is_ragged = step.facts.is_ragged
        if not is_ragged or not keras.backend.is_float_dtype(str(new.dtype)):
            return Plan(old, lambda _: new)
        # The replicas compute the same value, but in different branches of
        # the program, which the compiler may round differently.
        return Plan(old, _take_sum, keep_first(new, step.axis))
    if is_seed(variable):
        # `new` contains the random stream's seed and the number of draws so
        # far. Replicas with different numbers of rows may have drawn a
        # different number of times, so the stream continues from the largest
        # number. Its seed does not change.
        drawn = all_max(new[1], step.axis) if step.facts.is_ragged else new[1]
        return Plan(old, lambda _: jnp.stack([old[0], drawn]))
    rule = _find_rule(variable, step, is_metric)
    is_chosen = getattr(variable, "_ks_merge", "mean") != "mean"
    if rule != "sum" and not (is_metric or is_chosen):
        mark = marks.WEIGHT if variable.trainable else marks.STATE
        new = marks.mark(new, mark)
    return _plan_by_rule(step, rule, old, new, is_metric)


def _plan_by_rule(
    step: StepContext, rule: str, old: Array, new: Array, is_metric: bool
) -> Plan:
    if rule in (metric_rules.SAME, metric_rules.IN_TURN):
        return Plan(old, lambda _: new)
    number = as_number(new)
    if rule in ("max", "any", "min", "all"):
        find = all_max if rule in ("max", "any") else all_min
        found = find(number, step.axis)
        return Plan(old, lambda _: found)
    if rule == "sum" or (rule == metric_rules.MEAN and is_metric):
        change = new - _replace_infinite(old)
        if rule == "sum":
            share = marks.mark(change, marks.CHANGE)
        else:
            share = compute_mean_share(change, step)
        return Plan(old, lambda total: old + total, share)
    if rule == "mean":
        return Plan(old, _take_sum, compute_mean_share(new, step))
    return Plan(old, _take_sum, keep_first(number, step.axis))


def _take_sum(total: Array) -> Array:
    return total


def _replace_infinite(old: Array) -> Array:
    """Replaces entries that are not finite by 0.

    The change of a metric that is infinite is then infinite, and not NaN.
    """
    if not jnp.issubdtype(old.dtype, jnp.floating):
        return old
    return jnp.where(jnp.isfinite(old), old, jnp.zeros_like(old))


def compute_mean_share(value: Array, step: StepContext) -> Array:
    """Returns the summand that this replica contributes to an average.

    Returns:
      An array with the shape of `value`. The sum of these arrays over the
      replicas is the (weighted) average of `value` over the replicas.
    """
    if step.facts.share is None:
        return value / step.num_replicas
    share = jnp.asarray(step.facts.share, value.dtype)
    # Statistics over zero rows are NaN.
    return jnp.where(share > 0, value * share, jnp.zeros_like(value))


def _find_rule(
    variable: keras.Variable, step: StepContext, is_metric: bool
) -> str:
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


def cast_like(new: Array, old: Array) -> jax.Array:
    """Casts `new` to the dtype of `old`; a step must not change dtypes."""
    return jax.lax.convert_element_type(jnp.asarray(new), old.dtype)


def apply_changes(group: Group, changes: Group) -> Group:
    """Returns a group with the values that `find_changes` returned."""
    pairs = zip(group, changes, strict=True)
    return [old if new is None else new for old, new in pairs]


def find_changes(old: Group, new: Group) -> Group:
    """Returns the new values of changed variables; None for the others."""
    return [
        None if n is o or n is None else cast_like(n, o)
        for o, n in zip(old, new, strict=True)
    ]
