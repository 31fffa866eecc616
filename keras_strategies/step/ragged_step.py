"""A model's step when the replicas have different numbers of rows.

If the replicas cannot share a batch evenly, the step usually runs once over all
rows. If it uses the context of a single replica, each replica instead runs the
step on its own rows, in one program (`ragged_call`). A replica's loss is
weighted by its number of rows, so a replica without rows does not count.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import Jaxpr
from jax.tree_util import PyTreeDef

from keras_strategies._types import Batch, Tree
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import metric_rules, seeds
from keras_strategies.keras_bridge.step_context import (
    StepContext,
    StepFacts,
)
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.batches import RowShape
from keras_strategies.spmd.identity import IdentityMap
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import rows_of_replicas
from keras_strategies.step import step_logs
from keras_strategies.step.analysis import is_by_rows
from keras_strategies.step.ragged import replica_merge
from keras_strategies.step.ragged.ragged_call import (
    BranchResult,
    call_ragged,
)
from keras_strategies.step.ragged.variants import (
    Variant,
    compute_local_share,
    group_rows_of_all,
)


def assign_rows(
    shape: RowShape, padded: int, num_replicas: int
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Assigns an indivisible batch's rows to the replicas.

    The rows are distributed as evenly as possible.

    Args:
      shape: The row counts of the batch and of the processes. Rows that a
        process has read stay on the replicas of that process.
      padded: The number of rows including the padding.
      num_replicas: The number of replicas.

    Returns:
      Each replica's number of rows; for each replica, the indices of its rows
      in the padded batch, of which shorter lists are padded to the length of
      the longest; and for each row of the padded batch, its place among these
      indices.
    """
    parts = shape.parts or (shape.rows,)
    block, share = padded // len(parts), num_replicas // len(parts)
    counts = [c for p in parts for c in rows_of_replicas(p, p, share)]
    maximum = max(counts)
    places = [
        p * block + k for p, part in enumerate(parts) for k in range(part)
    ]
    indices, returned, start = [], np.zeros(padded, int), 0
    for replica, count in enumerate(counts):
        own = places[start : start + count]
        returned[own] = replica * maximum + np.arange(count)
        # The padding repeats the replica's last row.
        last = own[-1] if own else 0
        indices += own + [last] * (maximum - count)
        start += count
    return tuple(counts), np.asarray(indices), returned


def move_rows(
    rows: Tree, places: np.ndarray, axis: int, mesh: ReplicaMesh
) -> Tree:
    """Moves rows between replicas, within a compiled program.

    Args:
      rows: Arrays of shape (rows, ...), or (steps, rows, ...) if `axis` is 1.
      places: The index of each row that is taken; see `assign_rows`.
      axis: The dimension of the rows.
      mesh: The mesh of the replicas.
    """
    sharding = mesh.stacked if axis else mesh.split
    moved = jax.tree.map(lambda a: jnp.take(a, places, axis), rows)
    return jax.lax.with_sharding_constraint(moved, sharding)


Step = Callable[[StepContext, list[list[Any]], Batch], tuple[Any, Any]]
"""A model's step, as traced: (step, state, data) -> (outputs, new state)."""


def call_step(
    step_fn: Step,
    variables: tuple[list[keras.Variable], ...],
    old: list[list[Any]],
    data: Batch,
    *,
    mesh: ReplicaMesh,
    counts: tuple[int, ...],
    metrics: list[keras.Variable] | None,
) -> tuple[Tree, list[list[Any]]]:
    """Calls a model's step on each replica's rows, and merges the states.

    This function is called inside a mapped function.

    Args:
      step_fn: The step.
      variables: The groups of variables.
      old: The values of the variables.
      data: A replica's rows, padded to the largest number of rows of any
        replica.
      mesh: The mesh of the replicas.
      counts: Each replica's number of rows.
      metrics: The variables of metrics if the outputs are logs; None if the
        outputs have an entry for each row.

    Returns:
      The outputs: the logs of the global batch, or padded to one shape; and
      the new values of the groups of variables.
    """
    leaves, structure = jax.tree.flatten(data)
    rows = [(count,) * len(leaves) for count in counts]
    facts = StepFacts(
        mesh=mesh,
        rows=max(counts),
        is_ragged=True,
        rows_of_replicas=counts,
        share=compute_local_share(rows, mesh.all_replicas),
    )
    # The context of the step that merges the replicas' states.
    step = StepContext(facts=facts)
    flat = [v for group in variables for v in group]
    before = [value for group in old for value in group]
    folded = seeds.fold_seeds(flat, before, step)
    about = step_fn, facts, rows, variables, metrics, structure
    called, branches, _ = call_ragged(
        functools.partial(_call_replica, *about),
        rows,
        [True] * len(leaves),
        step.axis,
        folded,
        [leaf[None] for leaf in leaves],
        [seeds.is_seed(v) for v in flat] + [True] * len(leaves),
        functools.partial(_check_gradients, len(flat), set(counts) - {0}),
    )
    averaged = [] if metrics is None else called.outputs
    means = [merge_lib.compute_mean_share(output, step) for output in averaged]
    values, _, means = replica_merge.merge_state(
        step, flat, before, folded, called, branches, means
    )
    state, outputs = _group(values, variables), called.outputs
    structure, results = branches[0].structure
    if metrics is not None:
        pairs = list(zip(metrics, state[-1], strict=True))
        outputs = step_logs.read_logs(outputs, means, results, pairs)
    return jax.tree.unflatten(structure, outputs), state


def _check_gradients(
    num_variables: int, rows: set[int], jaxpr: Jaxpr, num_results: int
) -> None:
    """Checks that gradients are weighted by the replicas' numbers of rows."""
    if len(rows) > 1 and marks.has_unweighted_gradients(
        jaxpr, num_variables, num_results
    ):
        raise ValueError(
            "Gradients of a step that uses its replica context must be "
            "weighted by rows if the replicas have different numbers of rows. "
            f"Received: replicas with {sorted(rows)} rows, and a gradient of a "
            "loss that Keras did not compute. Use `compute_loss` or an object "
            "of `keras.losses.Loss`, combine the replicas' losses by "
            "`all_reduce`, or drop incomplete batches."
        )


def _call_replica(
    step_fn: Step,
    facts: StepFacts,
    rows: Sequence[Variant],
    groups: Sequence[list[keras.Variable]],
    metrics: list[keras.Variable] | None,
    structure: PyTreeDef,
    state: list[Any],
    leaves: list[Any],
) -> BranchResult:
    """Calls a model's step on one replica's rows.

    Args:
      step_fn: The step.
      facts: The facts of the step that merges the replicas' states.
      rows: For each replica, the number of rows of each array of the batch.
      groups: The groups of variables.
      metrics: See `call_step`.
      structure: The structure of the batch.
      state: The values of the variables.
      leaves: The arrays of the batch, of shape (1, rows, ...).
    """
    variables = [v for group in groups for v in group]
    count = leaves[0].shape[1]
    all_rows = group_rows_of_all((count,) * len(leaves), rows)
    step = StepContext(facts=facts).with_facts(
        rows=count, rows_of_all=all_rows, share=None
    )
    step.notes.replica_seeds.update(filter(seeds.is_seed, variables))
    step.notes.before = IdentityMap(zip(variables, state, strict=True))
    batch = jax.tree.unflatten(structure, [a[0] for a in leaves])
    outputs, values = step_fn(step, _group(state, groups), batch)
    if metrics is None and not is_by_rows(outputs, count):
        raise RuntimeError(
            "A predict step that uses its replica context must return one "
            "entry for each row. Received: outputs of shapes "
            f"{jax.tree.map(np.shape, outputs)} for {count} "
            "rows. Return an entry for each row, or use batch sizes that "
            "are divisible by the number of replicas."
        )
    new = [value for group in values for value in group]
    new = [s if n is None else n for n, s in zip(new, state, strict=True)]
    for variable in metrics or ():
        # By default, what the replicas added to a metric is summed up.
        if variable not in step.notes.metric_rules:
            step.notes.metric_rules[variable] = metric_rules.SUM
    after = IdentityMap(zip(variables, new, strict=True))
    flat, nest = jax.tree.flatten(outputs)
    results = [step_logs.find_result(step, out, after) for out in flat]
    arrays = list(map(jnp.asarray, flat))
    return replica_merge.make_branch_result(
        step, variables, (state, new), arrays, (nest, results)
    )


def _group(values: list[Any], like: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Splits a flat list into groups of the same lengths as those of `like`."""
    rest = iter(values)
    return [list(itertools.islice(rest, len(group))) for group in like]
