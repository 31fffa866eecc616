"""Computes the logs of the global batch from those of the replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._types import Array, Leaf, Logs
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks.metric_hooks import Result
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.identity import IdentityMap, IdentitySet


def find_averaged_logs(step: StepContext, logs: Logs) -> IdentitySet:
    """Returns the logs to average: those that are not results of metrics."""
    known = (step.notes.results, step.notes.equal)
    return IdentitySet(
        leaf
        for leaf in jax.tree.leaves(logs)
        if isinstance(leaf, jax.Array)
        and not any(leaf in values for values in known)
    )


def compute_share(step: StepContext, log: Array) -> Array:
    """Returns what this replica adds to a log.

    Integers are summed up if the step's trace is checked: that of a step that
    uses its replica context is not.
    """
    is_integer = jnp.issubdtype(log.dtype, jnp.integer)
    if is_integer and not step.notes.replica_uses:
        return marks.mark(log, marks.COUNT)
    return merge_lib.compute_mean_share(marks.mark(log, marks.LOG), step)


def merge_logs(
    step: StepContext,
    logs: Logs,
    metrics: list[keras.Variable],
    states: tuple[list[Any], list[Any]],
    means: IdentityMap[Any],
) -> Logs:
    """Returns the logs of the global batch, with results of merged metrics.

    Args:
      step: The step that was traced.
      logs: The logs that the step returned.
      metrics: The variables of metrics.
      states: The values of these variables on this replica, and their merged
        values.
      means: For each log from `find_averaged_logs`, its mean over the replicas.
    """
    local, merged = states
    new = IdentityMap(zip(metrics, local, strict=True))
    leaves, structure = jax.tree.flatten(logs)
    merged_leaves = read_logs(
        leaves,
        [means.get(leaf) for leaf in leaves],
        [find_result(step, leaf, new) for leaf in leaves],
        list(zip(metrics, merged, strict=True)),
    )
    return jax.tree.unflatten(structure, merged_leaves)


def find_result(
    step: StepContext, value: object, state: IdentityMap[Any]
) -> Result | None:
    """Returns the metric result that a value represents, or None.

    The result is also None if the metric was updated after the value was read.
    In that case the value was already merged when it was read.

    Args:
      step: The step that was traced.
      value: A value that the step returned.
      state: The final values of metrics' variables on this replica.
    """
    result = step.notes.results.get(value)
    if result is None or any(
        state[v] is not read
        for v, read in zip(result.variables, result.state, strict=True)
    ):
        return None
    return result


def read_logs(
    outputs: Sequence[Leaf],
    means: Sequence[Array | None],
    results: Sequence[Result | None],
    metrics: list[tuple[keras.Variable, Any]],
) -> list[Any]:
    """Returns the logs of a step for the rows of all replicas.

    Args:
      outputs: The outputs of the step on this replica.
      means: For each output, its mean over the replicas, or None.
      results: For each output, the metric result that it represents, or None.
      metrics: The metrics' variables and their merged values, from which
        results are read.
    """
    cache: IdentityMap[Any] = IdentityMap()

    def log(output: Leaf, mean: Array | None, result: Result | None) -> Leaf:
        if result is not None:
            metric, key = result.metric, result.key
            if metric not in cache:
                cache[metric] = metric.result()
            return cache[metric][key] if key else cache[metric]
        return output if mean is None else merge_lib.cast_like(mean, output)

    with keras.StatelessScope(state_mapping=metrics):
        columns = zip(outputs, means, results, strict=True)
        return [log(*column) for column in columns]
