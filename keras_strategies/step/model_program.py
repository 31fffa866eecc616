"""The base class of the compiled train, test and predict programs.

If the replicas can share a batch evenly, the model's step is mapped over the
replicas. Otherwise the same step runs once over the global batch, whose rows
XLA still shards over the devices. This is exact for every loss, metric and
layer, and no device stores more than its share
(docs/decisions/05-indivisible-batches.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding

from keras_strategies._types import Batch, Groups, Tree
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.step_context import (
    Group,
    ReplicaScope,
    StepContext,
    StepFacts,
    step_scope,
)
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.kernels.scanned_blocks import (
    scanning_blocks,
)
from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd import compiled
from keras_strategies.spmd.batches import RowShape, Segment
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import replicated_spec, split_spec
from keras_strategies.spmd.sharded_map import sharded_map
from keras_strategies.step import output_shardings
from keras_strategies.step.mapped_program import (
    Arguments,
    Body,
    MappedProgram,
    global_batch_trace,
    in_replica,
    jit_named,
    mapped_trace,
)
from keras_strategies.step.traced import call_on_global_batch
from keras_strategies.step.uneven_step import (
    UnevenCall,
    UnevenRows,
    call_step,
)
from keras_strategies.variables.shardings import (
    sharding_of,
    spec_of,
)


class ModelProgram:
    """The programs of a model's train, test or predict step.

    Each program is a pure function: (written, read, data) -> (results, written,
    changed), where `changed` maps indices in each read group to new values.

    Args:
      step: The model's step: `step(state, data) -> (results, state)`.
      name: The programs' name in profiles.
      variables: The groups of the model's variables, in the order of the
        state's groups.
      written: The indices of the groups that the step usually writes; these
        groups are donated. Of the other groups, only changed values are
        returned.
      mesh: The mesh of the replicas.
      is_global: Whether the step must see the global batch.
      replica_scope: Makes the context manager of a step's replica context.
    """

    # Whether the results have an entry for each row of the batch. Otherwise the
    # results are logs, and the last group contains the variables of metrics.
    _returns_rows = False

    def __init__(
        self,
        step: Callable[..., Any],
        name: str,
        variables: tuple[list[keras.Variable], ...],
        *,
        written: tuple[int, ...] = (),
        mesh: ReplicaMesh,
        is_global: bool = False,
        replica_scope: ReplicaScope | None = None,
    ) -> None:
        self._step, self._name = step, name
        self._replica_scope = replica_scope
        self._variables = variables
        self._written = written
        self._mesh = mesh
        self._read = tuple(i for i in range(len(variables)) if i not in written)
        self._specs = [[spec_of(v, mesh) for v in g] for g in variables]
        self._is_sharded = any(
            isinstance(spec, Sharded) for group in self._specs for spec in group
        )
        self._programs = self._make_programs(name, is_global)

    def _make_programs(self, name: str, is_global: bool) -> MappedProgram:
        mesh, has_rows = self._mesh, self._returns_rows
        is_sharded, has_cores = self._is_sharded, mesh.cores_per_replica > 1

        def constrain(
            body: Callable[..., Any],
            results: NamedSharding = mesh.whole,
            *,
            is_even: bool = False,
        ) -> Callable[..., Any]:
            if not (has_cores or (is_sharded and not has_rows)):
                return body
            written, read = self._divide(self._find_shardings(is_even))
            return output_shardings.constrain_step(body, written, read, results)

        of_one, of_many = (
            (mesh.split, mesh.stacked) if has_rows else (mesh.whole,) * 2
        )
        one, many = map(self._map_even_step, (False, True))
        whole, each = self._run_global_batch, self._run_uneven_rows
        of_whole, of_uneven = (f"{name}_{of}" for of in ("whole", "uneven"))
        jit_for_shape = functools.partial(
            jit_named, donate_argnums=0, static_argnums=3
        )
        return MappedProgram(
            one=jit_named(
                constrain(one, of_one, is_even=True), name, donate_argnums=0
            ),
            many=jit_named(
                constrain(many, of_many, is_even=True),
                f"{name}s",
                donate_argnums=0,
            ),
            whole=jit_for_shape(
                constrain(whole),
                of_whole,
                out_shardings=None if is_sharded or has_cores else mesh.whole,
            ),
            uneven=jit_for_shape(
                each if has_rows else constrain(each), of_uneven
            ),
            is_global=is_global,
        )

    def _find_shardings(self, is_even: bool) -> Sequence[Sequence[Any]]:
        """Returns the shardings of the state of one of the programs."""
        mesh = self._mesh
        return [[sharding_of(v, mesh) for v in g] for g in self._variables]

    def _map_even_step(self, stacked: bool) -> Body:
        return self._map_step(self._replica_step, stacked=stacked)

    def _map_step(
        self,
        step: Body,
        *,
        stacked: bool,
        on_state: Callable[[Body], Body] = lambda body: body,
    ) -> Body:
        """Maps a step over the replicas, for one batch or stacked batches.

        Args:
          step: The step.
          stacked: Whether the step receives stacked batches.
          on_state: Changes the form in which the step takes and returns the
            state.
        """
        replicated = replicated_spec()
        # The loop over stacked batches is inside the mapped function, except
        # with sharded variables: then the loop is around the mapped step.
        is_inner = stacked and not self._is_sharded
        split = split_spec(self._mesh, dim=int(is_inner))
        specs, results = (replicated, replicated), replicated
        if self._is_sharded:
            specs, results = self._divide(self._specs), self._result_specs
        elif self._returns_rows:
            results = (split, replicated, replicated)
        if not self._is_sharded:
            step = on_state(step)
        body = sharded_map(
            self._scan_steps(step) if is_inner else step,
            self._mesh,
            in_specs=(*specs, split),
            out_specs=results,
        )
        if not self._is_sharded:
            return body
        body = on_state(body)
        return self._scan_steps(body) if stacked else body

    def _result_specs(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        _, _, changed = results
        written, read = self._divide(self._specs)
        of_changed = [
            {k: group[int(k)] for k in values}
            for group, values in zip(read, changed, strict=True)
        ]
        has_rows = self._returns_rows
        of_results = split_spec(self._mesh) if has_rows else replicated_spec()
        return of_results, written, of_changed

    def _run_global_batch(
        self, written: Group, read: Group, data: Batch, shape: RowShape
    ) -> tuple[Any, ...]:
        """Runs the step on all rows of one or several batches, unpadded."""
        body = self._global_body
        fn = self._scan_steps(body) if shape.steps > 1 else body
        return call_on_global_batch(
            fn, (written, read), data, shape, self._mesh
        )

    def _run_uneven_rows(
        self, written: Group, read: Group, data: Batch, shape: RowShape
    ) -> tuple[Any, ...]:
        """Runs the step on each replica's rows, without padding.

        The replicas may have different numbers of rows.
        """
        mesh, axis = self._mesh, int(shape.steps > 1)
        padded = jax.tree.leaves(data)[0].shape[axis]
        rows = UnevenRows.of(shape, padded, mesh.num_replicas)
        step = functools.partial(self._uneven_step, rows.counts)
        body = self._map_step(step, stacked=shape.steps > 1)
        results, *state = body(written, read, rows.take(data, axis, mesh))
        if self._returns_rows:
            results = rows.put_back(results, axis, mesh)
        return results, *state

    def _run(self, state: Groups, segment: Segment) -> tuple[Any, Groups]:
        """Runs one program and returns its results and the new state."""
        results, new, changed = self._start(
            functools.partial(dispatch, self._mesh), state, segment
        )
        read = [
            merge_lib.apply_changes(state[i], values) if values else state[i]
            for i, values in zip(self._read, changed, strict=True)
        ]
        return results, tuple(self._order_groups(new, read))

    def _start(
        self, call: Callable[..., Any], state: Groups, segment: Segment
    ) -> Any:
        args = self._arguments(state, segment)
        return self._programs.start(
            call, args, segment, is_shared=not segment.is_padded
        )

    def _arguments(self, state: Groups, segment: Segment) -> Arguments:
        return lambda is_mapped: (*self._divide(state), segment.data)

    def lower(self, state: Groups, segment: Segment) -> jax.stages.Lowered:
        """Lowers the program that a call would run; accepts abstract arrays."""
        with kernels_for(self._mesh):
            return self._start(compiled.lower, state, segment)

    def _divide(self, groups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        written = [groups[i] for i in self._written]
        return written, [groups[i] for i in self._read]

    def _order_groups(self, written: Group, read: Group) -> list[Any]:
        places = (*self._written, *self._read)
        groups = dict(zip(places, (*written, *read), strict=True))
        return [groups[i] for i in range(len(places))]

    def _select_changes(
        self, old: Sequence[Group], new: Sequence[Group]
    ) -> tuple[list[Any], list[Any]]:
        written = [
            [
                merge_lib.cast_like(n, o)
                for n, o in zip(new[i], old[i], strict=True)
            ]
            for i in self._written
        ]
        return written, [
            merge_lib.find_changes(old[i], new[i]) for i in self._read
        ]

    def _call(self, state: Sequence[Group], data: Batch) -> tuple[Any, Any]:
        """Calls the model's step."""
        _forget_loss_ids(self._step)
        return self._step(tuple(map(list, state)), data)

    def _call_in_replica(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        """Calls the model's step while it is traced for a replica."""
        with (
            trace_hooks(),
            kernels_for(self._mesh),
            scanning_blocks(),
            step_scope(step),
            in_replica(self._replica_scope, step),
        ):
            return self._call(state, data)

    def _replica_step(
        self, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        rows = jax.tree.leaves(data)[0].shape[0]
        step = StepContext(facts=StepFacts(mesh=self._mesh, rows=rows))
        if step.num_replicas == 1:
            return self._global_body(written, read, data, step)
        with mapped_trace(step, self._step):
            return self._mapped_body(step, written, read, data)

    def _global_body(
        self,
        written: Group,
        read: Group,
        data: Batch,
        step: StepContext | None = None,
    ) -> tuple[Any, ...]:
        old = self._order_groups(written, read)
        with global_batch_trace(
            self._mesh, self._replica_scope, self._step, step
        ):
            results, new = self._call(old, data)
        return results, *self._select_changes(old, new)

    def _uneven_step(
        self, counts: tuple[int, ...], written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        """Runs the step on replicas with different numbers of rows."""
        old = self._order_groups(written, read)
        called = call_step(
            self._on_rows,
            self._variables,
            old,
            data,
            mesh=self._mesh,
            counts=counts,
            metrics=None if self._returns_rows else self._variables[-1],
        )
        results = self._uneven_results(called)
        return results, *self._select_changes(old, called.state)

    def _mapped_body(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        """Runs the step on a replica, and combines the replicas' states."""
        raise NotImplementedError

    def _on_rows(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        """Runs the model's step on a replica's rows.

        Returns:
          The results, and the new state.
        """
        raise NotImplementedError

    def _uneven_results(self, called: UnevenCall) -> Tree:
        """Returns the step's results from the outcome of `call_step`."""
        raise NotImplementedError

    def _scan_steps(self, body: Body) -> Body:
        """Turns the step of one batch into a loop over stacked batches."""
        raise NotImplementedError


def _forget_loss_ids(step: Callable[..., Any]) -> None:
    """Clears the ids of losses that earlier traces left on a model's layers.

    In a trace, Keras (3.15) knows a layer's losses by their `id`, and keeps the
    ids after the trace. When it calls the layer in a later trace, it drops the
    losses with these ids, among which may be one of another layer: an object
    may have the id of one that is gone (docs/upstream.md).

    Args:
      step: A model's train, test or predict step.
    """
    model = getattr(step, "__self__", None)
    if isinstance(model, keras.Layer):
        for layer in model._flatten_layers():
            layer._loss_ids.clear()
