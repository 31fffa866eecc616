"""Logs of a replica's step as those of the global batch."""

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._types import Array, Leaf, Logs
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
    leaves, structure = jax.tree.flatten(logs)
    found = read_logs(
        leaves,
        [means.get(leaf) for leaf in leaves],
        [current_result(step, leaf, new) for leaf in leaves],
        list(zip(metrics, merged, strict=True)),
    )
    return jax.tree.unflatten(structure, found)


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


def read_logs(
    outputs: Sequence[Leaf],
    means: Sequence[Array | None],
    results: Sequence[Result | None],
    metrics: list[tuple[keras.Variable, Any]],
) -> list[Any]:
    """Returns what a step logs, of the rows of all replicas.

    Args:
      outputs: What it returned on this replica.
      means: Of each the mean over the replicas, or None.
      results: Of each the metric's result that it is, or None.
      metrics: Metrics' variables and their merged values, which results are
        read from.
    """
    cache: IdentityMap[Any] = IdentityMap()

    def log(output: Leaf, mean: Array | None, result: Result | None) -> Leaf:
        if result is not None:
            metric, key = result.metric, result.key
            if metric not in cache:
                cache[metric] = metric.result()
            return cache[metric][key] if key else cache[metric]
        return output if mean is None else merge_lib.as_type_of(mean, output)

    with keras.StatelessScope(state_mapping=metrics):
        columns = zip(outputs, means, results, strict=True)
        return [log(*column) for column in columns]
