"""A model's step when all replicas have the same number of rows."""

from collections.abc import Sequence

import jax
import keras

from keras_strategies._types import Batch, Tree
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import seeds, summands
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.spmd.identity import IdentityMap, IdentitySet
from keras_strategies.step import step_logs
from keras_strategies.step.ragged_step import Step
from keras_strategies.step.state.layout import OPTIMIZER


def call_on_replica(
    step: StepContext,
    step_fn: Step,
    variables: tuple[list[keras.Variable], ...],
    old: list[Group],
    data: Batch,
    *,
    metrics: list[keras.Variable] | None,
    local_sums: Sequence[int],
) -> tuple[Tree, list[Group]]:
    """Calls a model's step on a replica's rows, and merges the states.

    Args:
      step: The context of the trace.
      step_fn: The step.
      variables: The groups of variables.
      old: The values of the variables.
      data: The replica's rows.
      metrics: The last group if the results are logs; None if they have an
        entry for each row.
      local_sums: See `Layout`.

    Returns:
      The results, and the new values of the groups of variables.
    """
    folded = [
        seeds.fold_seeds(group, values, step)
        for group, values in zip(variables, old, strict=True)
    ]
    if step.facts.sums_later:
        summands.begin(step, local_sums, folded[OPTIMIZER])
    pairs = zip(metrics or (), folded[-1], strict=False)
    step.notes.before = IdentityMap(pairs)
    results, new = step_fn(step, folded, data)
    if metrics is not None:
        # If the step resets a metric, the metric's change is measured from its
        # value after the last reset.
        folded[-1] = [step.notes.before[v] for v in metrics]
        old = [*old[:-1], folded[-1]]
    plans = []
    for group in zip(variables, old, folded, new, strict=True):
        is_metric = group[0] is metrics
        plans.append(
            [
                merge_lib.plan_variable(step, *values, is_metric)
                for values in zip(*group, strict=True)
            ]
        )
    if metrics is None:
        return results, merge_lib.combine(step, plans)[0]
    logs, structure = jax.tree.flatten(results)
    # Those that are not results of metrics.
    known = (step.notes.results, step.notes.equal)
    averaged = IdentitySet(
        log
        for log in logs
        if isinstance(log, jax.Array)
        and not any(log in values for values in known)
    )
    shares = [step_logs.compute_share(step, log) for log in averaged]
    merged, sums = merge_lib.combine(step, plans, shares)
    means = IdentityMap(zip(averaged, sums, strict=True))
    after = IdentityMap(zip(metrics, new[-1], strict=True))
    logs = step_logs.read_logs(
        logs,
        [means.get(log) for log in logs],
        [step_logs.find_result(step, log, after) for log in logs],
        list(zip(metrics, merged[-1], strict=True)),
    )
    return jax.tree.unflatten(structure, logs), merged
