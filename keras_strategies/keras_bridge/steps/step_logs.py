"""Logs of a replica's step as those of the global batch."""

from typing import Any

import jax
import keras

from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.step_context import Logs, StepContext


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
) -> Any:
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
    mapping = list(zip(metrics, merged, strict=True))
    cache: IdentityMap[Any] = IdentityMap()

    def whole(value: Any) -> Any:
        if value in means:
            return merge_lib.as_type_of(means[value], value)
        result = step.notes.results.get(value)
        if result is None or any(
            new[v] is not mine
            for v, mine in zip(result.variables, result.state, strict=True)
        ):
            # Read before a later update: it was merged on the spot.
            return value
        metric = result.metric
        if metric not in cache:
            cache[metric] = metric.result()
        whole_result = cache[metric]
        return whole_result[result.key] if result.key else whole_result

    with keras.StatelessScope(state_mapping=mapping):
        return jax.tree.map(whole, logs)
