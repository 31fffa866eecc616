"""Computes the logs of the global batch from those of the replicas."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies._types import Array, Leaf
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks.metric_hooks import Result
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.identity import IdentityMap


def compute_share(step: StepContext, log: Array) -> Array:
    """Returns what this replica adds to a log.

    Integers are summed up if the step's trace is checked: that of a step that
    uses its replica context is not.
    """
    is_integer = jnp.issubdtype(log.dtype, jnp.integer)
    if is_integer and not step.notes.replica_uses:
        return marks.mark(log, marks.COUNT)
    return merge_lib.compute_mean_share(marks.mark(log, marks.LOG), step)


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
