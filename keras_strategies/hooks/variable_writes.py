"""Writes to user-defined variables in a function passed to `run`.

As in tf.distribute, the values that the replicas write are combined by the
variable's `aggregation`, and the result is written on all replicas.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies._types import Array
from keras_strategies.hooks.metric_rules import SUM
from keras_strategies.hooks.on_read import is_on_read
from keras_strategies.hooks.seeds import is_seed
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.spmd.replica_map import all_sum, keep_first


def is_user_defined(variable: keras.Variable) -> bool:
    """Returns whether a user created a variable or chose its aggregation.

    Creation is recorded only in a strategy's scope. For other variables the
    path decides: if a layer, metric or optimizer created the variable, the path
    begins with the name of that object, and so differs from the variable's
    name.
    """
    if variable.aggregation != "none":
        return True
    has_own_path = variable.path == variable.name
    made_by_user = getattr(variable, "_ks_users", has_own_path)
    return made_by_user and not is_seed(variable)


def assign(
    step: StepContext,
    original: Callable[..., Any],
    variable: keras.Variable,
    value: Array,
) -> Array:
    """Writes the replicas' combined value to a user-defined variable.

    This replaces `assign`, `assign_add` and `assign_sub` in a function passed
    to `run`. Writes to variables that are not user-defined are unchanged.

    Args:
      step: The step that is being traced.
      original: Keras's method: `assign`, `assign_add` or `assign_sub`.
      variable: The variable.
      value: This replica's value.

    Returns:
      The result of `original`: the variable's new value.
    """
    if (
        not step.facts.is_local
        or step.flags.in_assign
        or step.flags.in_metric
        or is_on_read(variable)
        or not is_user_defined(variable)
    ):
        return original(variable, value)
    if variable.synchronization == "on_read" and variable.path != variable.name:
        # The user writes a metric's variable directly: the replicas' changes
        # are summed.
        if variable not in step.notes.metric_rules:
            step.notes.metric_rules[variable] = SUM
        return original(variable, value)
    has_rule = getattr(variable, "_ks_merge", None) is not None
    if has_rule and not step.flags.in_update:
        # The rule of `ks.merge` combines the values after the step.
        return original(variable, value)
    if variable.aggregation == "none" or step.flags.in_update:
        step.notes.unaggregated.add(variable)
        return original(variable, value)
    array = jnp.asarray(value)
    if variable.aggregation == "only_first_replica":
        array = keep_first(array, step.axis)
    (array,) = all_sum([array], step.axis)
    if variable.aggregation == "mean":
        array = array / step.num_replicas
    with step.flag("in_assign"):
        result = original(variable, array)
    step.notes.equal.add(variable.value)
    return result
