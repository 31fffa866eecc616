"""A user's function as one compiled program over the replicas.

One abstract trace finds the variables that the function reads and writes. The
values of written variables are donated; the program combines the replicas' new
values. Each result is one array over all replicas. Small results are also
summed in the program, because most of them are losses to be reduced next.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.hooks import on_read, seeds
from keras_strategies.hooks.variables_used import CollectingScope, LiftingScope
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.passes.replay import separate_trace
from keras_strategies.run import replica_trace
from keras_strategies.spmd import compiled
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.identity import IdentityMap, IdentitySet
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    add_dim,
    as_number,
    drop_dim,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.spmd.sharded_map import sharded_map
from keras_strategies.spmd.values import STACKED, PerReplica, stack_replicas
from keras_strategies.step import output_shardings
from keras_strategies.step.ragged import replica_merge
from keras_strategies.step.ragged.ragged_call import BranchResult, call_ragged
from keras_strategies.step.ragged.variants import (
    Variant,
    compute_local_share,
    cut_to_rows,
    find_variants,
    group_rows_of_all,
)
from keras_strategies.step.traced import combine_sums, jit_named
from keras_strategies.variables import shardings
from keras_strategies.variables.model_variables import (
    Owned,
    are_unshared,
    defer_creation,
    has_rivals,
    note_devices,
    refer_to,
    take_ownership,
)


class RunProgram:
    """A function compiled for arguments of one structure, shapes and dtypes.

    Args:
      fn: `fn(leaves) -> results`: the user's function. `leaves` are one
        replica's components of the arguments that are arrays.
      is_split: For each leaf, whether it is split over the replicas; otherwise
        it is replicated.
      rows: For each leaf, None; or, if the replicas have different shapes, the
        row count or shape on each replica. The array is padded to the largest.
      mesh: The mesh of the replicas.
      replica_scope: Makes the context manager of a step's replica context.
      is_update: Whether the function writes the same value to every copy of a
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
        self._is_ragged = [counts is not None for counts in rows]
        # For each replica, the row counts or shapes of all uneven arguments.
        uneven = [counts for counts in rows if counts is not None]
        self._variant_rows = list(zip(*uneven, strict=True))
        # Lifted variables: written, with separate copies, and all others.
        self._written: list[keras.Variable] = []
        self._on_read: list[keras.Variable] = []
        self._read: list[keras.Variable] = []
        self._last_read: list[Any] = []
        # The last call's variables, and whether all replicas wrote the same.
        self._same: list[tuple[keras.Variable, Any]] | None = None
        note_devices(mesh)

    def prepare(
        self, leaves: list[Any], others: Iterable[keras.Variable] = ()
    ) -> None:
        """Finds the function's variables and builds the program.

        Nothing runs yet. Must be called in the strategy's scope, because the
        function may create variables.

        Args:
          leaves: The arguments that are arrays.
          others: Other variables whose `trainable` the function may read.
        """
        scope = self._find_variables(leaves)
        self.lifted = list(scope.variables)
        shardings.shard_slots_by_names(self.lifted, self._mesh)
        known = IdentitySet((*others, *self.lifted))
        self._trainable = [(weakref.ref(v), v.trainable) for v in known]
        for variable in self.lifted:
            on_read.create_copies(variable, self._mesh)
            has_copies = on_read.is_on_read(variable)
            if not has_copies and variable not in scope.written:
                self._read.append(variable)
                continue
            replica_trace.refuse_foreign(variable, self._mesh)
            (self._on_read if has_copies else self._written).append(variable)
        self._build()

    def _find_variables(self, leaves: list[Any]) -> LiftingScope:
        """Traces the function once, to find the variables that it uses."""
        scope = LiftingScope()
        step = replica_trace.make_step(self._mesh, is_update=self._is_update)
        variant = self._variant_rows[0] if self._variant_rows else ()

        def abstract(*components: Array) -> Any:
            scope.enter_trace()
            leaves = cut_to_rows(variant, self._is_ragged, list(components))
            # Here, variables are zeros: no later trace may reuse an inner one.
            with (
                separate_trace("ks.lifting"),
                replica_trace.replica_tracing(step, self._replica_scope),
            ):
                self._fn(leaves)
            return jnp.zeros((1,))

        mapped = replica_map(
            abstract,
            self._mesh,
            in_specs=tuple(self._specs),
            out_specs=split_spec(self._mesh),
        )
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
        with defer_creation(), scope:
            jax.eval_shape(mapped, *shapes)
        return scope

    def _build(self) -> None:
        mesh, replicated = self._mesh, replicated_spec()
        split = split_spec(mesh)
        written, read = (
            [shardings.get_spec(v, mesh) for v in group]
            for group in (self._written, self._read)
        )
        new = written + [replicated] * len(self._on_read)
        program = sharded_map(
            combine_sums(self._body, mesh),
            mesh,
            in_specs=(written, split, read, self._specs),
            out_specs=(split, split, replicated, replicated, new, replicated),
        )
        variables = self.written, self._read
        program = output_shardings.constrain_run(program, *variables, mesh)
        self._program = jit_named(program, "run", donate_argnums=(0, 1))

    def lower(self, leaves: list[Any]) -> jax.stages.Lowered:
        """Lowers the program for the arguments' shapes, without values."""
        mesh = self._mesh
        written = shardings.get_shapes(self._written, mesh)
        copies = on_read.make_copy_shapes(self._on_read, mesh)
        read = shardings.get_shapes(self._read, mesh)
        with replica_trace.kernels_for(mesh):
            return compiled.lower(self._program, written, copies, read, leaves)

    @property
    def written(self) -> list[keras.Variable]:
        """The variables whose values the program returns."""
        return [*self._written, *self._on_read]

    @property
    def is_current(self) -> bool:
        """Whether the variables' `trainable` is unchanged since the trace."""
        return all(
            (variable := reference()) is None or variable.trainable == flag
            for reference, flag in self._trainable
        )

    def __call__(self, leaves: list[Any], last: Owned) -> Tree:
        """Runs the function once on every replica.

        Args:
          leaves: The arguments that are arrays.
          last: Maps a variable's id to the last array that a program returned
            for the variable. Updated in place.
        """
        mesh = self._mesh
        values, shared = self._collect_state(last)
        copies = [on_read.get_copies(v, mesh) for v in self._on_read]
        self._check_last()
        arrays, new_copies, sums, same, new, report = dispatch(
            mesh, self._program, values, copies, shared, leaves
        )
        for variable, value in zip(self._written, new, strict=False):
            variable._value = value
            last[id(variable)] = weakref.ref(value)
        aggregates = new[len(self._written) :]
        for variable, copy, value in zip(
            self._on_read, new_copies, aggregates, strict=True
        ):
            on_read.set_copies(variable, copy, value)
        unchecked = map(self._written.__getitem__, report.unchecked)
        is_first = self._same is None
        self._same = list(zip(unchecked, same, strict=True))
        if is_first:
            # Later results are checked at the next call, to avoid waiting.
            self._check_last()
        return self._make_results(report, arrays, sums)

    def _collect_state(self, last: Owned) -> tuple[Any, Any]:
        """Returns the values of written and read variables for the program."""
        written, read, mesh = self._written, self._read, self._mesh
        values = [v._value for v in written]
        references = [last.get(id(v)) for v in written]
        is_rivalled = has_rivals(mesh)
        # Arrays that a program returned, and that only the variables refer to,
        # can be donated. Others are checked, and copied if used elsewhere.
        if is_rivalled or not are_unshared(values, references):
            pairs = zip(map(id, values), references, strict=True)
            owned = None if is_rivalled else {k: r for k, r in pairs if r}
            take_ownership(values, written, (), owned, mesh, donate=True)
        shared = [v._value for v in read]
        if not refer_to(self._last_read, shared):
            take_ownership(shared, read, (), None, mesh, donate=False)
            # If arrays had to be moved, the variables do not have these, so all
            # of them are checked again at the next call.
            self._last_read = list(map(weakref.ref, shared))
        return values, shared

    def _check_last(self) -> None:
        """Raises ValueError if replicas wrote unequal values to a variable."""
        for variable, same in self._same or ():
            if not bool(np.asarray(same)):
                self._same = []
                replica_trace.refuse_difference(variable)

    def _make_results(
        self,
        report: replica_trace.TraceReport,
        arrays: list[Any],
        sums: list[Any],
    ) -> Tree:
        totals = dict(zip(report.summed, sums, strict=True))
        wrapped = [
            PerReplica.of(array, STACKED, totals.get(k), report.shapes[k])
            for k, array in enumerate(arrays)
        ]
        if self._mesh.num_replicas == 1:
            wrapped = [array[0] for array in arrays]
        return replica_trace.rebuild_nest(
            report.structure, report.constants, wrapped, self._wrap_differing
        )

    def _wrap_differing(self, values: list[Any]) -> PerReplica:
        """Wraps a number that depends on the replica's number of rows."""
        variants = find_variants(self._variant_rows)
        mesh, of = self._mesh, self._variant_rows
        local = [values[variants.index(of[r])] for r in mesh.local_replicas]
        return PerReplica.of(stack_replicas(local, mesh), STACKED)

    # The methods below are called while the program is traced.

    def _body(
        self,
        written: list[Any],
        copies: list[Any],
        read: list[Any],
        leaves: list[Any],
    ) -> tuple[Any, ...]:
        step = replica_trace.make_step(self._mesh, is_update=self._is_update)
        variables = [*self.written, *self._read]
        old = [*written, *[drop_dim(c, self._mesh) for c in copies], *read]
        folded = seeds.fold_seeds(variables, old, step)
        step = step.with_facts(
            is_ragged=bool(self._variant_rows),
            share=compute_local_share(self._variant_rows, step.axis),
        )
        called, traced, shapes = self._call_variants(variables, folded, leaves)
        report = replica_trace.make_report(
            self._mesh, called.outputs, traced, shapes, len(self._written)
        )
        values, new_copies, sums = replica_merge.merge_state(
            step,
            variables,
            old,
            folded,
            called,
            traced,
            [as_number(called.outputs[k]) for k in report.summed],
        )
        same = [
            replica_trace.is_same(called.new[k], step.axis)
            for k in report.unchecked
        ]
        return (
            [add_dim(output, self._mesh) for output in called.outputs],
            [add_dim(copy, self._mesh) for copy in new_copies],
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
    ) -> BranchResult:
        """Calls the function with one replica's arguments."""
        step = replica_trace.make_step(self._mesh, is_update=self._is_update)
        uneven = itertools.compress(leaves, self._is_ragged)
        sizes = tuple(leaf.shape[1] for leaf in uneven)
        step = step.with_facts(
            rows_of_all=group_rows_of_all(sizes, self._variant_rows)
        )
        step.notes.replica_seeds.update(filter(seeds.is_seed, variables))
        step.notes.before = IdentityMap(zip(variables, folded, strict=True))
        mapping = zip(variables, folded, strict=True)
        scope = CollectingScope(mapping, initialize_variables=False)
        with replica_trace.replica_tracing(step, self._replica_scope), scope:
            results = self._fn(leaves)
        return replica_trace.collect_call(
            step, scope, results, variables, folded
        )

    def _call_variants(
        self,
        variables: list[keras.Variable],
        folded: list[Any],
        leaves: list[Any],
    ) -> tuple[BranchResult, list[BranchResult], list[Any] | None]:
        """Calls all variants; returns what `call_ragged` does."""
        if not self._variant_rows:
            called = self._call(variables, folded, leaves)
            return called, [called], None
        return call_ragged(
            lambda state, leaves: self._call(variables, state, leaves),
            self._variant_rows,
            self._is_ragged,
            self._mesh.all_replicas,
            folded,
            leaves,
            [seeds.is_seed(v) or on_read.is_on_read(v) for v in variables]
            + self._is_split,
        )
