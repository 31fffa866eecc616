"""A user's function as one compiled program over the replicas.

The variables it reads and writes are found by one abstract trace; the written
ones are donated and come back merged. Its results are one array over all
replicas each; small ones are summed along the way, since most are losses that
are reduced next.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.identity import IdentityMap
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    as_number,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies._core.sharded_map import sharded_map
from keras_strategies._core.values import (
    PADDED,
    STACKED,
    PerReplica,
    Shapes,
    stacked,
)
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks import on_read, seeds
from keras_strategies.keras_bridge.hooks.variables_used import (
    CollectingScope,
    LiftingScope,
)
from keras_strategies.keras_bridge.run import replica_trace
from keras_strategies.keras_bridge.run.run_results import TraceReport, nest_of
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.keras_bridge.steps import output_shardings, replica_merge
from keras_strategies.keras_bridge.steps.mapped_program import jitted
from keras_strategies.keras_bridge.steps.replica_merge import Note
from keras_strategies.keras_bridge.steps.trace_checks import sums_combined
from keras_strategies.keras_bridge.steps.uneven_rows import (
    Called,
    call_unevenly,
)
from keras_strategies.keras_bridge.steps.variants import (
    Variant,
    own_share,
    rows_of_all,
    variants_of,
    with_rows,
)
from keras_strategies.keras_bridge.variables import ownership, shardings
from keras_strategies.keras_bridge.variables.deferred_creation import deferred


class RunProgram:
    """One function for one structure, shapes and dtypes of arguments.

    Args:
      fn: `fn(leaves) -> results`: the user's function of the arguments that
        are arrays, one component each.
      is_split: For each of them, whether it is split over the replicas (else
        every replica gets it whole).
      rows: For each of them None, or each replica's number of rows, or its
        shape, where they differ: the array is padded to the most.
      mesh: The replicas.
      replica_scope: Makes a replica context of a step for a block.
      is_update: Whether the function writes the same to every copy of a
        variable (`extended.update`).

    Attributes:
      lifted: The variables that the function reads or writes.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Any],
        is_split: list[bool],
        rows: list[Variant | None],
        *,
        mesh: ReplicaMesh,
        replica_scope: ReplicaScope,
        is_update: bool = False,
    ) -> None:
        self._fn = fn
        self._mesh = mesh
        self._replica_scope = replica_scope
        self._is_update = is_update
        self._is_split = is_split
        self._specs = [
            split_spec(mesh) if split else replicated_spec()
            for split in is_split
        ]
        self._is_uneven = [counts is not None for counts in rows]
        # Each replica's numbers of rows, or shapes, of all uneven arguments.
        self._variant_of = list(
            zip(*[counts for counts in rows if counts is not None], strict=True)
        )
        self.lifted: list[keras.Variable] = []
        self._trainable: list[tuple[Any, bool]] = []
        # The lifted variables: written ones, those with a copy on each
        # replica, and those that are only read.
        self._written: list[keras.Variable] = []
        self._on_read: list[keras.Variable] = []
        self._read: list[keras.Variable] = []
        self._last_read: list[Any] = []
        # Of the last call: variables, and whether all replicas wrote one value.
        self._same: list[tuple[keras.Variable, Any]] | None = None
        self._program: Any = None
        ownership.note_devices(mesh)

    def prepare(
        self, leaves: list[Any], others: Iterable[keras.Variable] = ()
    ) -> None:
        """Finds the variables and builds the program; runs nothing.

        To be called in the strategy's scope: the function may create
        variables.

        Args:
          leaves: The arguments that are arrays.
          others: Variables whose being trainable the function may look at.
        """
        scope = self._lifting(leaves)
        self.lifted = list(scope.variables)
        shardings.follow_by_names(self.lifted, self._mesh)
        known = {id(v): v for v in (*others, *self.lifted)}
        self._trainable = [
            (weakref.ref(v), v.trainable) for v in known.values()
        ]
        for variable in self.lifted:
            on_read.settle(variable, self._mesh)
            if on_read.is_on_read(variable):
                self._on_read.append(variable)
            elif variable in scope.written:
                replica_trace.refuse_foreign(variable, self._mesh)
                self._written.append(variable)
            else:
                self._read.append(variable)
        self._build()

    def _lifting(self, leaves: list[Any]) -> LiftingScope:
        """Traces the function once, for the variables that it uses."""
        scope = LiftingScope()
        # Another mesh: JAX keeps what it traced of inner functions by the mesh,
        # too, and must not meet this trace's zeros again.
        mesh = dataclasses.replace(self._mesh, marker="lifting")
        step = replica_trace.new_step(mesh, is_update=self._is_update)

        def abstract(*components: Array) -> Any:
            own = list(components)
            if self._variant_of:
                own = with_rows(self._variant_of[0], self._is_uneven, own)
            with replica_trace.replica_tracing(step, self._replica_scope):
                self._fn(own)
            return jnp.zeros((1,))

        mapped = replica_map(
            abstract,
            mesh,
            in_specs=tuple(self._specs),
            out_specs=split_spec(mesh),
        )
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
        with deferred(), scope:
            jax.eval_shape(mapped, *shapes)
        return scope

    def _build(self) -> None:
        whole, split = replicated_spec(), split_spec(self._mesh)
        written, read = (
            [shardings.spec_of(v, self._mesh) for v in group]
            for group in (self._written, self._read)
        )
        new = written + [whole] * len(self._on_read)
        program = sharded_map(
            sums_combined(self._body, replica_trace.new_step(self._mesh)),
            self._mesh,
            in_specs=(written, split, read, self._specs),
            out_specs=(split, split, whole, whole, new, whole),
        )
        program = output_shardings.run(program, self.written, self._mesh)
        self._program = jitted(program, "run", donate_argnums=(0, 1))

    def lower(self, leaves: list[Any]) -> jax.stages.Lowered:
        """Lowers the program for arguments' shapes; reads no values."""
        mesh = self._mesh
        return self._program.lower(
            shardings.shapes_of(self._written, mesh),
            on_read.shapes_of_copies(self._on_read, mesh),
            shardings.shapes_of(self._read, mesh),
            leaves,
        )

    @property
    def written(self) -> list[keras.Variable]:
        """The variables that the function writes."""
        return [*self._written, *self._on_read]

    @property
    def is_current(self) -> bool:
        """Whether the variables are as they were when it was traced."""
        return all(
            (variable := reference()) is None or variable.trainable == flag
            for reference, flag in self._trainable
        )

    def __call__(self, leaves: list[Any], last: ownership.Made) -> Tree:
        """Runs the function once on every replica.

        Args:
          leaves: The arguments that are arrays.
          last: By the id of a variable, the array that a program returned
            for it last; brought up to date.
        """
        mesh = self._mesh
        taken, shared = self._state(last)
        copies = [on_read.copies_of(v, mesh) for v in self._on_read]
        self._check_last()
        arrays, new_copies, sums, same, new, report = dispatch(
            mesh, self._program, taken, copies, shared, leaves
        )
        for variable, value in zip(self._written, new, strict=False):
            variable._value = value
            last[id(variable)] = weakref.ref(value)
        aggregates = new[len(self._written) :]
        for variable, copy, value in zip(
            self._on_read, new_copies, aggregates, strict=True
        ):
            on_read.hold(variable, copy, value)
        unchecked = map(self._written.__getitem__, report.unchecked)
        is_first = self._same is None
        self._same = list(zip(unchecked, same, strict=True))
        if is_first:
            # Later ones are checked at the next call: no one waits for them.
            self._check_last()
        return self._results(report, arrays, sums)

    def _state(self, last: ownership.Made) -> tuple[list[Any], list[Any]]:
        """The values of written and of read variables, ready to be passed."""
        written, read, mesh = self._written, self._read, self._mesh
        taken = [v._value for v in written]
        known = [last.get(id(v)) for v in written]
        is_rivalled = ownership.has_rivals(mesh)
        if is_rivalled or not ownership.are_alone(taken, known):
            made = zip(map(id, taken), known, strict=True)
            made = None if is_rivalled else {k: r for k, r in made if r}
            ownership.own(taken, written, (), made, mesh, donate=True)
        shared = [v._value for v in read]
        if not ownership.are(self._last_read, shared):
            references = list(map(weakref.ref, shared))
            ownership.own(shared, read, (), None, mesh, donate=False)
            # Those that had to be moved are looked at again next time.
            are_moved = not ownership.are(references, shared)
            self._last_read = [] if are_moved else references
        return taken, shared

    def _check_last(self) -> None:
        """Raises ValueError if replicas wrote a variable differently."""
        for variable, same in self._same or ():
            if not bool(np.asarray(same)):
                self._same = []
                replica_trace.refuse_difference(variable)

    def _results(
        self, report: TraceReport, arrays: list[Any], sums: list[Any]
    ) -> Tree:
        totals = dict(zip(report.summed, sums, strict=True))
        wrapped = (
            self._wrapped(array, totals.get(k), report.shapes_of(k))
            for k, array in enumerate(arrays)
        )
        return nest_of(
            report.structure, report.constants, wrapped, self._differing
        )

    def _differing(self, values: list[Any]) -> PerReplica:
        """A number that is another one for replicas with other rows."""
        variants = variants_of(self._variant_of)
        mesh, of = self._mesh, self._variant_of
        own = [values[variants.index(of[r])] for r in mesh.local_replicas]
        return PerReplica.of(stacked(own, mesh), STACKED)

    def _wrapped(
        self, array: Array, total: Array | None, shapes: Shapes | None
    ) -> Array | PerReplica:
        if self._mesh.num_replicas == 1:
            return array[0]
        if shapes is None:
            return PerReplica.of(array, STACKED, total)
        return PerReplica.of(array, PADDED, shapes=shapes)

    # The traced side.

    def _body(
        self,
        written: list[Any],
        copies: list[Any],
        read: list[Any],
        leaves: list[Any],
    ) -> tuple[Any, ...]:
        step = replica_trace.new_step(self._mesh, is_update=self._is_update)
        variables = [*self.written, *self._read]
        old = [*written, *[c[0] for c in copies], *read]
        folded = seeds.fold_seeds(variables, old, step)
        step = step.with_facts(
            is_uneven=bool(self._variant_of),
            share=own_share(self._variant_of, step.axis),
        )
        called, notes, shapes = self._called(variables, folded, leaves)
        report = replica_trace.report_of(
            self._mesh, called.outputs, notes, shapes, len(self._written)
        )
        values, new_copies, sums = replica_merge.merged_state(
            step,
            variables,
            old,
            folded,
            called,
            notes,
            [as_number(called.outputs[k]) for k in report.summed],
        )
        same = [
            replica_trace.is_same(called.new[k], step.axis)
            for k in report.unchecked
        ]
        return (
            [output[None] for output in called.outputs],
            [copy[None] for copy in new_copies],
            sums,
            same,
            values[: len(self.written)],
            report,
        )

    def _call(
        self,
        variables: list[keras.Variable],
        folded: list[Any],
        leaves: list[Any],
    ) -> Called:
        """The function on one replica's arguments."""
        step = replica_trace.new_step(self._mesh, is_update=self._is_update)
        own = [
            leaf.shape[1]
            for leaf, uneven in zip(leaves, self._is_uneven, strict=True)
            if uneven
        ]
        step = step.with_facts(
            rows_of_all=rows_of_all(tuple(own), self._variant_of)
        )
        step.notes.own_seeds.update(filter(seeds.is_seed, variables))
        step.notes.before = IdentityMap(zip(variables, folded, strict=True))
        mapping = zip(variables, folded, strict=True)
        scope = CollectingScope(mapping, initialize_variables=False)
        with replica_trace.replica_tracing(step, self._replica_scope), scope:
            results = self._fn(leaves)
        return replica_trace.called_in(step, scope, results, variables, folded)

    def _called(
        self,
        variables: list[keras.Variable],
        folded: list[Any],
        leaves: list[Any],
    ) -> tuple[Called, list[Note], list[list[tuple[int, ...]]] | None]:
        """What was computed, the variants' notes, each replica's shapes."""
        if not self._variant_of:
            called = self._call(variables, folded, leaves)
            return called, [called.note], None
        return call_unevenly(
            lambda state, own: self._call(variables, state, own),
            self._variant_of,
            self._is_uneven,
            self._mesh.all_replicas,
            folded,
            leaves,
            [seeds.is_seed(v) or on_read.is_on_read(v) for v in variables]
            + self._is_split,
        )
