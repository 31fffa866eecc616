"""Combines the variables' values that the replicas wrote in a call."""

from typing import Any

import keras
from jax.tree_util import PyTreeDef

from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import on_read
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.step.ragged.ragged_call import BranchResult


def make_branch_result(
    step: StepContext,
    variables: list[keras.Variable],
    values: tuple[list[Any], list[Any]],
    outputs: list[Any],
    structure: tuple[PyTreeDef, Any],
) -> BranchResult:
    """Makes the `BranchResult` of a traced call.

    Args:
      step: The context of the step in which the call ran.
      variables: The variables that the call may write.
      values: Two lists: the variables' values before the call, in which seeds
        are those of this replica, and their values after it.
      outputs: The results that are arrays.
      structure: The structure of the results, and what else is needed to
        rebuild them, such as results that are not arrays.
    """
    folded, new = values
    start = [step.notes.before[v] for v in variables]
    return BranchResult(
        outputs=outputs,
        new=new,
        start=start,
        structure=structure,
        is_changed=[
            n is not f or s is not f
            for n, f, s in zip(new, folded, start, strict=True)
        ],
        is_equal=[n in step.notes.equal for n in new],
        rules=[step.notes.metric_rules.get(v) for v in variables],
        is_unaggregated=[v in step.notes.unaggregated for v in variables],
    )


def merge_state(
    step: StepContext,
    variables: list[keras.Variable],
    old: list[Any],
    folded: list[Any],
    called: BranchResult,
    branches: list[BranchResult],
    summands: list[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Combines the replicas' values of variables after a call.

    Args:
      step: The context of the step in which values are combined.
      variables: The variables.
      old: The values of the variables before the call.
      folded: Like `old`, but with the seeds that this replica used.
      called: The result of the call on this replica.
      branches: The result of the call in each variant's trace.
      summands: Other arrays to sum over the replicas.

    Returns:
      Three lists: the combined values of all variables; this replica's copies
      of the variables that have a separate copy on each replica; and the sums
      of `summands`. The combined value of a variable with separate copies is
      the aggregate of its copies.
    """
    new, start = list(called.new), list(called.start)
    for k, variable in enumerate(variables):
        if not any(branch.is_changed[k] for branch in branches):
            new[k], start[k] = folded[k], old[k]
        elif branches[0].rules[k] is None:
            start[k] = old[k]
        if all(branch.is_equal[k] for branch in branches):
            step.notes.equal.add(new[k])
        rule = branches[0].rules[k]
        if rule is not None:
            step.notes.metric_rules[variable] = rule
    plans, copies = [], []
    values = zip(variables, start, folded, new, strict=True)
    for k, (v, s, f, n) in enumerate(values):
        if on_read.is_on_read(v):
            copies.append(merge_lib.cast_like(n, f))
            plans.append(on_read.plan_aggregate(step, v, copies[-1]))
        elif called.is_alike and called.is_alike[k] and n in step.notes.equal:
            plans.append(merge_lib.Plan(s, lambda _, n=n: n))
        else:
            is_metric = v in step.notes.metric_rules
            plan = merge_lib.plan_variable(step, v, s, f, n, is_metric)
            plans.append(plan)
    (values,), sums = merge_lib.combine(step, [plans], summands)
    return values, copies, sums
