"""A model's step whose replicas hold different numbers of rows.

A batch that the replicas cannot share evenly runs over all rows at once, unless
the step asks its replica context for what one replica alone has: then each
replica runs the step on its own rows, in one program (`uneven_rows`). A
replica's loss is weighted by its rows, and one without rows counts nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from keras_strategies._core.batches import RowShape
from keras_strategies._core.identity import IdentityMap
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.rows import rows_of_replicas
from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.hooks import metric_rules, seeds
from keras_strategies.keras_bridge.step_context import (
    StepContext,
    StepFacts,
)
from keras_strategies.keras_bridge.steps import replica_merge, step_logs
from keras_strategies.keras_bridge.steps.uneven_rows import (
    Called,
    call_unevenly,
)
from keras_strategies.keras_bridge.steps.variants import (
    Variant,
    own_share,
    rows_of_all,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenRows:
    """How the rows of an indivisible batch go to the replicas.

    Attributes:
      counts: Each replica's number of rows.
      taken: Where in the padded batch each replica's rows are, all padded to
        the most rows of a replica.
      returned: Where among those each row of the padded batch is.
    """

    counts: tuple[int, ...]
    taken: np.ndarray
    returned: np.ndarray

    @classmethod
    def of(
        cls, shape: RowShape, padded: int, num_replicas: int
    ) -> "UnevenRows":
        """Shares a batch's rows as evenly as possible.

        Args:
          shape: The batch; each process's rows stay with its replicas.
          padded: The number of rows with the padding.
          num_replicas: Number of replicas.
        """
        parts = shape.parts or (shape.rows,)
        block, share = padded // len(parts), num_replicas // len(parts)
        counts = [c for p in parts for c in rows_of_replicas(p, p, share)]
        most = max(counts)
        places = [
            p * block + k for p, part in enumerate(parts) for k in range(part)
        ]
        taken, returned, start = [], np.zeros(padded, int), 0
        for replica, count in enumerate(counts):
            own = places[start : start + count]
            returned[own] = replica * most + np.arange(count)
            taken += own + [own[-1] if own else 0] * (most - count)
            start += count
        return cls(
            counts=tuple(counts), taken=np.asarray(taken), returned=returned
        )

    def take(self, data: Batch, axis: int, mesh: ReplicaMesh) -> Batch:
        """Moves each replica's rows to it; to be compiled.

        Returns:
          A batch in which each replica has as many rows as the one with most.
        """
        return _moved(data, self.taken, axis, mesh)

    def put_back(self, outputs: Tree, axis: int, mesh: ReplicaMesh) -> Tree:
        """Puts the replicas' outputs where the batch's rows were.

        Returns:
          The outputs of shape (rows, ...), or (steps, rows, ...).
        """
        return _moved(outputs, self.returned, axis, mesh)


def _moved(
    rows: Tree, places: np.ndarray, axis: int, mesh: ReplicaMesh
) -> Tree:
    sharding = mesh.stacked if axis else mesh.split
    moved = jax.tree.map(lambda a: jnp.take(a, places, axis), rows)
    return jax.lax.with_sharding_constraint(moved, sharding)


Step = Callable[[StepContext, list[list[Any]], Batch], tuple[Any, Any]]
"""A model's step in its trace: (step, state, data) -> (outputs, new state)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenCall:
    """What the replicas computed, and the state that it was merged into.

    Attributes:
      outputs: The step's arrays, padded to one shape; of its own structure.
      structure: That structure.
      results: Of each output the metric's result that it is, if it is one.
      state: The groups' new values.
      means: Each output's mean over the replicas that have rows; of outputs
        that are numbers.
    """

    outputs: list[Any]
    structure: Any
    results: list[Any]
    state: list[list[Any]]
    means: list[Any]


def call_step(
    step_fn: Step,
    variables: tuple[list[keras.Variable], ...],
    old: list[list[Any]],
    data: Batch,
    *,
    mesh: ReplicaMesh,
    counts: tuple[int, ...],
    metrics: list[keras.Variable] | None,
) -> UnevenCall:
    """Calls a model's step on each replica's own rows; in a mapped function.

    Args:
      step_fn: The step.
      variables: The groups of variables.
      old: Their values.
      data: A replica's rows, padded to the most.
      mesh: The replicas.
      counts: Each replica's number of rows.
      metrics: The variables of metrics; the outputs are then numbers to be
        averaged. None: neither.
    """
    leaves, structure = jax.tree.flatten(data)
    rows = [(count,) * len(leaves) for count in counts]
    step = _merging_step(counts, rows, mesh)
    flat = [v for group in variables for v in group]
    before = [value for group in old for value in group]
    folded = seeds.fold_seeds(flat, before, step)
    one = _OneReplica(step_fn, step.facts, rows, variables, metrics, structure)
    called, notes, _ = call_unevenly(
        one.call,
        rows,
        [True] * len(leaves),
        step.axis,
        folded,
        [leaf[None] for leaf in leaves],
        [seeds.is_seed(v) for v in flat] + [True] * len(leaves),
    )
    averaged = [] if metrics is None else called.outputs
    means = [merge_lib.share_of_mean(output, step) for output in averaged]
    values, _, means = replica_merge.merged_state(
        step, flat, before, folded, called, notes, means
    )
    structure, results = notes[0].structure
    return UnevenCall(
        outputs=called.outputs,
        structure=structure,
        results=results,
        state=_grouped(values, variables),
        means=means,
    )


def _merging_step(
    counts: tuple[int, ...], rows: Sequence[Variant], mesh: ReplicaMesh
) -> StepContext:
    """Returns the step in which the replicas' states are merged."""
    facts = StepFacts(
        mesh=mesh,
        rows=max(counts),
        is_uneven=True,
        rows_of_replicas=counts,
        share=own_share(rows, mesh.all_replicas),
    )
    return StepContext(facts=facts)


@dataclasses.dataclass(frozen=True)
class _OneReplica:
    """A model's step on one replica's rows.

    Attributes:
      step_fn: The step.
      facts: Those of the step in which the states are merged.
      rows: Each replica's numbers of rows, of all arrays of the batch.
      variables: The groups of variables.
      metrics: Those of metrics, if the outputs are numbers to be averaged.
      structure: The batch's.
    """

    step_fn: Step
    facts: StepFacts
    rows: Sequence[Variant]
    variables: Sequence[list[keras.Variable]]
    metrics: list[keras.Variable] | None
    structure: PyTreeDef

    def call(self, state: list[Any], leaves: list[Any]) -> Called:
        """Calls the step on a state and a batch's arrays: (1, rows, ...)."""
        count = leaves[0].shape[1]
        of_all = rows_of_all((count,) * len(leaves), self.rows)
        step = StepContext(facts=self.facts).with_facts(
            rows=count, rows_of_all=of_all, share=None
        )
        variables = [v for group in self.variables for v in group]
        step.notes.own_seeds.update(filter(seeds.is_seed, variables))
        step.notes.before = IdentityMap(zip(variables, state, strict=True))
        batch = jax.tree.unflatten(self.structure, [a[0] for a in leaves])
        groups = _grouped(state, self.variables)
        outputs, groups = self.step_fn(step, groups, batch)
        new = [value for group in groups for value in group]
        new = [s if n is None else n for n, s in zip(new, state, strict=True)]
        for variable in self.metrics or ():
            # By default what the replicas added to a metric is added up.
            if variable not in step.notes.metric_rules:
                step.notes.metric_rules[variable] = metric_rules.SUM
        after = IdentityMap(zip(variables, new, strict=True))
        flat, structure = jax.tree.flatten(outputs)
        results = [step_logs.current_result(step, out, after) for out in flat]
        return replica_merge.called(
            step,
            variables,
            (state, new),
            list(map(jnp.asarray, flat)),
            (structure, results),
        )


def _grouped(
    values: list[Any], like: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Returns values in groups of as many as those of another nest."""
    rest = iter(values)
    return [list(itertools.islice(rest, len(group))) for group in like]
