"""Traces a model's step on a replica's rows, before anything is lowered.

A trace is a record of the step: the jaxpr, the structure of its outputs, and
what the hooks noted. JAX caches records by its own key (shapes, dtypes, weak
types, and its settings) together with a `TraceKind`, so the programs of one
batch and of several stacked batches share a record.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax.extend.core import ClosedJaxpr

from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge.step_context import (
    Group,
    StepContext,
    StepFacts,
    StepNotes,
)
from keras_strategies.passes import traces
from keras_strategies.passes.marked_updates import collected
from keras_strategies.passes.stages import get_shape
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.step.traced import Traced


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceKind:
    """The key of a trace of a step on a replica's rows, besides JAX's own.

    Attributes:
      is_retrace: Whether this is a further trace, with another number of rows,
        made only to find out what depends on the number of rows.
      growth: The number of rows of such a trace, divided by that of a replica.
      sums_later: Whether accumulated gradients are summed over the replicas
        only in the optimizer's updates.
    """

    is_retrace: bool = False
    growth: float = 1.0
    sums_later: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """A record of one trace of a step.

    Attributes:
      kind: The kind of the trace.
      rows: The number of rows that the step received.
      num_row_arrays: The number of arrays that have these rows, the last inputs
        of the trace.
      traced: The traced step; None if its code raised an error.
      error: The error that the step's code raised, or None.
      reason: The reason of a hook why the step needs the global batch, or None.
      replica_uses: Names of the members of the replica context that the step
        used.
      sizes: See `StepNotes.sizes`.
    """

    kind: TraceKind
    rows: int
    num_row_arrays: int
    traced: Any = None
    error: Exception | None = None
    reason: str | None = None
    replica_uses: Sequence[str] = ()
    sizes: Sequence[tuple[float, bool, str]] = ()

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The traced step."""
        return self.traced.jaxpr


class StepTracer:
    """Traces a model's step on a replica's rows.

    Args:
      body: The step on a replica: `(step, written, read, data) -> results`.
      variables: The variables of the written and of the read groups.
      mesh: The mesh of the replicas.
      forget: A function that clears what a failed trace left on the model.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        variables: Sequence[Sequence[Sequence[keras.Variable]]],
        mesh: ReplicaMesh,
        forget: Callable[[], None],
    ) -> None:
        self._body, self._mesh, self._forget = body, mesh, forget
        self._variables = variables
        self._notes = StepNotes()
        # JAX's caches, which outlive the model, have only numbers of records.
        self._records: list[Record] = []
        self._record = jax.jit(self._make_record, static_argnums=0)

    def trace(
        self,
        kind: TraceKind,
        batch: Batch,
        rows: int | None = None,
        growth: float = 1.0,
    ) -> Record:
        """Traces the step; not again with the same key.

        Args:
          kind: The kind of the trace of a replica.
          batch: The shapes of a batch that the replicas share evenly.
          rows: The number of rows of a further trace; None for a replica's.
          growth: See `TraceKind`.
        """
        if rows is not None:
            kind = dataclasses.replace(kind, is_retrace=True, growth=growth)
            batch = with_leading((rows * self._mesh.num_replicas,), batch)
        state = jax.tree.map(get_shape, self._variables)
        try:
            traced = self._record.trace(kind, *state, batch)
        except Exception as error:
            self._forget()
            # A warning that a filter turns into an error tells its own reason.
            is_warning = isinstance(error, Warning)
            if is_warning or traces.is_problem_of_package(error):
                raise
            size = jax.tree.leaves(batch)[0].shape[0]
            num_rows = size // self._mesh.num_replicas
            return self._describe(
                kind, num_rows, batch, self._notes, error=error
            )
        finally:
            # Notes contain values of the trace, which refer to all of it.
            self._notes = StepNotes()
        (number,) = traced.out_tree.unflatten(())
        return self._records[number]

    def trace_again(
        self, record: Record, batch: Batch, rows: int | None = None
    ) -> Record:
        """Traces a step with another number of rows, for comparison.

        Args:
          record: The record of the step.
          batch: The shapes of a batch; their rows are ignored.
          rows: The number of rows of a replica; None for that of the global
            batch, which is then the batch of one replica.
        """
        if rows is None:
            rows = self._mesh.num_replicas * record.rows
            # Not two: a trace of two rows stands for one of a single row.
            rows = rows if rows > 2 else 4
        with (
            temporary_attribute(collected, "known", record.traced.updates),
            warnings.catch_warnings(),
        ):
            # The first trace has warned already.
            warnings.simplefilter("ignore")
            return self.trace(record.kind, batch, rows, rows / record.rows)

    def _make_record(
        self,
        kind: TraceKind,
        written: Sequence[Group],
        read: Sequence[Group],
        data: Batch,
    ) -> dict[int, None]:
        """Appends a record; its number is the structure of an empty tree."""
        replicated = replicated_spec()
        number = len(self._records)

        def trace(written: Any, read: Any, data: Batch) -> tuple[()]:
            rows = jax.tree.leaves(data)[0].shape[0]
            facts = StepFacts(mesh=self._mesh, rows=rows, **vars(kind))
            step = StepContext(facts=facts)
            self._notes = step.notes

            def body(*args: Tree) -> Tree:
                return self._body(step, *args)

            traced = Traced(body, written, read, data)
            self._records.append(
                self._describe(kind, rows, data, step.notes, traced=traced)
            )
            return ()

        mapped = replica_map(
            trace,
            self._mesh,
            in_specs=(replicated, replicated, split_spec(self._mesh)),
            out_specs=replicated,
            is_rearranged=True,
        )
        with traces.without_collector():
            mapped(written, read, data)
        return {number: None}

    def _describe(
        self,
        kind: TraceKind,
        rows: int,
        data: Batch,
        notes: StepNotes,
        **outcome: Any,
    ) -> Record:
        return Record(
            kind=kind,
            rows=rows,
            num_row_arrays=len(jax.tree.leaves(data)),
            reason=notes.global_batch_reason,
            replica_uses=tuple(notes.replica_uses),
            sizes=tuple(notes.sizes),
            **outcome,
        )


def with_leading(
    sizes: tuple[int, ...],
    data: Batch,
    sharding: jax.sharding.Sharding | None = None,
) -> Batch:
    """Returns a batch's shapes with different leading dimensions.

    Args:
      sizes: The dimensions that replace the row dimension.
      data: The batch.
      sharding: The sharding to set on the shapes, or None.

    Returns:
      A nest of `jax.ShapeDtypeStruct`, of shapes (*sizes, ...).
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (*sizes, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        data,
    )
