"""Merge of what replicas wrote in a call into one state for all."""

import dataclasses
from typing import Any

import keras
from jax.tree_util import PyTreeDef

from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.hooks import on_read
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.keras_bridge.steps.uneven_rows import Called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What is known of a call when it is traced.

    Attributes:
      structure: The results' structure, and which of them are not arrays.
      is_changed: Whether each variable was written.
      is_equal: Whether it was written the same on every replica.
      rules: How the variables of metrics are merged; None of others.
      is_unaggregated: Whether the replicas must have written the same value.
    """

    structure: Any
    is_changed: list[bool]
    is_equal: list[bool]
    rules: list[str | None]
    is_unaggregated: list[bool]


def called(
    step: StepContext,
    variables: list[keras.Variable],
    values: tuple[list[Any], list[Any]],
    outputs: list[Any],
    structure: tuple[PyTreeDef, Any],
) -> Called:
    """Returns what a traced call left behind, with its note.

    Args:
      step: The step that it ran in.
      variables: The variables that are of interest.
      values: Their values before it, with the replica's seeds, and after it.
      outputs: The results that are arrays.
      structure: That of its results.
    """
    folded, new = values
    start = [step.notes.before[v] for v in variables]
    note = Note(
        structure=structure,
        is_changed=[
            n is not f or s is not f
            for n, f, s in zip(new, folded, start, strict=True)
        ],
        is_equal=[n in step.notes.equal for n in new],
        rules=[step.notes.metric_rules.get(v) for v in variables],
        is_unaggregated=[v in step.notes.unaggregated for v in variables],
    )
    return Called(outputs=outputs, new=new, start=start, note=note)


def merged_state(
    step: StepContext,
    variables: list[keras.Variable],
    old: list[Any],
    folded: list[Any],
    called: Called,
    notes: list[Note],
    summands: list[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Merges the variables' values after a call over the replicas.

    Args:
      step: The step of the merge.
      variables: The variables.
      old: Their values before the call.
      folded: As `old`, with the seeds that the replica used.
      called: What the call computed.
      notes: Of every variant of the call.
      summands: Arrays to be summed over the replicas beside.

    Returns:
      The values, aggregated ones for variables with a copy on each replica;
      the copies of those, in their order; the sums.
    """
    new, start = list(called.new), list(called.start)
    for k, variable in enumerate(variables):
        if not any(note.is_changed[k] for note in notes):
            new[k], start[k] = folded[k], old[k]
        elif notes[0].rules[k] is None:
            start[k] = old[k]
        if all(note.is_equal[k] for note in notes):
            step.notes.equal.add(new[k])
        rule = notes[0].rules[k]
        if rule is not None:
            step.notes.metric_rules[variable] = rule
    plan = merge_lib.Merge(step=step)
    finishers, copies = [], []
    values = zip(variables, start, folded, new, strict=True)
    for k, (v, s, f, n) in enumerate(values):
        if on_read.is_on_read(v):
            copy = merge_lib.cast_like(n, f)
            copies.append(copy)
            finishers.append(on_read.plan_aggregate(plan, v, copy))
            continue
        if called.is_alike and called.is_alike[k] and n in step.notes.equal:
            finishers.append(lambda sums, n=n, s=s: merge_lib.cast_like(n, s))
            continue
        finish = merge_lib.plan_merge(
            plan, [v], [s], [f], [n], are_metrics=v in step.notes.metric_rules
        )
        finishers.append(lambda sums, finish=finish: finish(sums)[0])
    places = [plan.add(summand) for summand in summands]
    sums = plan.compute_sums()
    values = [finish(sums) for finish in finishers]
    return values, copies, [sums[place] for place in places]
