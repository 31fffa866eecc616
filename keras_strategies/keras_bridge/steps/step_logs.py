"""Logs of a replica's step as those of the global batch."""

from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._types import Array, Logs
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.hooks.metric_hooks import Result
from keras_strategies.keras_bridge.step_context import StepContext


def averaged_logs(step: StepContext, logs: Logs) -> IdentitySet:
    """Returns the logs that are averaged: those that no metric returned."""
    return IdentitySet(
        leaf
        for leaf in jax.tree.leaves(logs)
        if isinstance(leaf, jax.Array) and leaf not in step.notes.results
    )


def merged_logs(
    step: StepContext,
    logs: Logs,
    metrics: list[keras.Variable],
    states: tuple[list[Any], list[Any]],
    means: IdentityMap[Any],
) -> Logs:
    """Returns logs of all rows: results read from the merged metrics.

    Args:
      step: The step that was traced.
      logs: What it returned.
      metrics: The variables of metrics.
      states: Their values on this replica, and the merged ones.
      means: By the logs of `averaged_logs`, their means over the replicas.
    """
    own, merged = states
    new = IdentityMap(zip(metrics, own, strict=True))
    read = result_reader()

    def whole(value: Array) -> Array:
        if value in means:
            return merge_lib.as_type_of(means[value], value)
        result = current_result(step, value, new)
        return value if result is None else read(result)

    mapping = list(zip(metrics, merged, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return jax.tree.map(whole, logs)


def current_result(
    step: StepContext, value: object, state: IdentityMap[Any]
) -> Result | None:
    """Returns the metric's result that a value is, or None.

    None, too, where it was read before a later update: it was merged then.

    Args:
      step: The step that was traced.
      value: What it returned.
      state: The values of metrics' variables on this replica, in the end.
    """
    result = step.notes.results.get(value)
    if result is None or any(
        state[v] is not mine
        for v, mine in zip(result.variables, result.state, strict=True)
    ):
        return None
    return result


def result_reader() -> Callable[[Result], Any]:
    """Returns what computes results again, of the state in the scope."""
    cache: IdentityMap[Any] = IdentityMap()

    def read(result: Result) -> Array:
        metric, key = result.metric, result.key
        if metric not in cache:
            cache[metric] = metric.result()
        return cache[metric][key] if key else cache[metric]

    return read
