"""The base class of the compiled train, test and predict programs.

A `Router` traces the step and decides which program runs a batch; this class
lowers the programs and calls them. If the replicas can share a batch evenly,
the model's step is mapped over them. Otherwise it runs once over the global
batch, whose rows XLA shards over the devices.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding

from keras_strategies._types import Batch, Groups
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.keras_bridge.step_context import (
    Group,
    ReplicaScope,
    StepContext,
)
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd import compiled
from keras_strategies.spmd.batches import RowShape, Segment
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import replicated_spec, split_spec
from keras_strategies.spmd.sharded_map import sharded_map
from keras_strategies.step.even_step import call_on_replica
from keras_strategies.step.in_place_step import make_stateless
from keras_strategies.step.model_call import ModelCall
from keras_strategies.step.output_shardings import constrain_values
from keras_strategies.step.ragged_step import (
    assign_rows,
    call_step,
    move_rows,
)
from keras_strategies.step.record import StepTracer, TraceKind
from keras_strategies.step.route import Form, Route
from keras_strategies.step.router import Router
from keras_strategies.step.state.host_slots import keep_slots_on_host
from keras_strategies.step.state.layout import (
    OPTIMIZER,
    PLAIN,
    Layout,
    Step,
)
from keras_strategies.step.traced import (
    call_on_global_batch,
    combine_sums,
    jit_named,
    scan_steps,
)
from keras_strategies.variables.host_memory import to_device, to_host
from keras_strategies.variables.shardings import (
    get_sharding,
    get_spec,
    is_on_host,
)

WRITTEN = {"train": (0, 1, 2, 3), "test": (2,), "predict": ()}
"""For each kind of step, the indices of the groups that it usually writes.

These groups are donated; of the others, only changed values are returned."""

_STATEFUL = "a layer of the model stores a state for each row"
_INDIVISIBLE = "the replicas cannot share the rows of its batch evenly"


class ModelProgram:
    """The programs of a model's train, test or predict step.

    Each program is a function (written, read, data) -> (results, written,
    changed), where `changed` has the new values of each read group, and None
    for a value that did not change.

    Args:
      model: The built model.
      mesh: The mesh of the replicas.
      kind: `"train"`, `"test"` or `"predict"`.
      variables: The groups of the model's variables, in the order of the
        state's groups.
      replica_scope: Makes the context manager of a step's replica context.
      layout: The layout of the state in mapped programs.

    Attributes:
      find_route: Returns the route of batches; see `Router`.
    """

    # Whether the results have an entry for each row of the batch. Otherwise the
    # results are logs, and the last group contains the variables of metrics.
    _returns_rows = False

    def __init__(
        self,
        model: keras.Model,
        mesh: ReplicaMesh,
        kind: str,
        variables: tuple[list[keras.Variable], ...],
        replica_scope: ReplicaScope,
        layout: Layout,
    ) -> None:
        self._name, self._mesh = f"{kind}_step", mesh
        step = make_stateless(model, kind, variables)
        self._model_call = ModelCall(
            step, mesh, replica_scope, is_predict=self._returns_rows
        )
        self._written = written = WRITTEN[kind]
        self._variables = variables
        self._metrics = None if self._returns_rows else variables[-1]
        self._read = tuple(i for i in range(len(variables)) if i not in written)
        self._specs = [[get_spec(v, mesh) for v in g] for g in variables]
        self._is_sharded = any(
            isinstance(spec, Sharded) for group in self._specs for spec in group
        )
        layers = model._flatten_layers()
        # An RNN, for example.
        is_stateful = any(getattr(v, "stateful", False) for v in layers)
        self._router = Router(
            StepTracer(
                self._replica_body,
                self._divide(variables),
                mesh,
                self._model_call.forget_losses,
            ),
            step,
            mesh,
            global_reason=_STATEFUL if is_stateful else None,
            returns_rows=self._returns_rows,
            is_training=kind == "train",
        )
        self.find_route = self._router.find_route
        self._layout = layout
        # Whether mapped programs keep the layout; None if that is not known.
        self._is_kept = True if layout is PLAIN else None
        self._router.kind = TraceKind(sums_later=bool(layout.local_sums))
        sizes = [len(variables[i]) for i in written]
        # The weights and the other variables come before the optimizer's.
        places = [sum(sizes[:OPTIMIZER]) + i for i in layout.local_sums]
        self._router.summands = places, sum(sizes)
        self._scan = functools.partial(
            scan_steps, returns_rows=self._returns_rows
        )
        self._programs = self._make_programs()

    def _make_programs(self) -> dict[Form, jax.stages.Wrapped]:
        """Makes the jitted program of each form; two also take a `RowShape`."""
        mesh, has_rows, name = self._mesh, self._returns_rows, self._name
        has_cores = mesh.cores_per_replica > 1
        on_host = (is_on_host(v) for group in self._variables for v in group)
        is_placed = self._is_sharded or any(on_host)

        def constrain(
            body: Callable[..., Any],
            results: NamedSharding = mesh.whole,
            *,
            is_even: bool = False,
        ) -> Callable[..., Any]:
            if not (has_cores or (is_placed and not has_rows)):
                return body

            def run_constrained(state: Any, *args: Any) -> tuple[Any, ...]:
                found = [
                    [get_sharding(v, mesh) for v in group]
                    for group in self._variables
                ]
                layout = self._mapped_layout if is_even else PLAIN
                shardings = self._divide(layout.find_shardings(found))
                groups, _ = self._divide(self._variables)
                # Mapped steps move the slots themselves, when they need them.
                move = to_host if is_even else to_device
                state = list(map(move, state, groups))
                outputs, *changes = body(state, *args)
                new, changed, outputs = constrain_values(
                    (*changes, outputs), (*shardings, results)
                )
                return outputs, list(map(to_host, new, groups)), changed

            return run_constrained

        even_results, stacked_results = (
            (mesh.split, mesh.stacked) if has_rows else (mesh.whole,) * 2
        )
        even, stacked = (
            functools.partial(self._run_even_rows, is_stacked)
            for is_stacked in (False, True)
        )
        ragged = self._run_ragged_rows
        jit = functools.partial(jit_named, donate_argnums=0)
        jit_for_shape = functools.partial(jit, static_argnums=3)
        return {
            Form.EVEN: jit(constrain(even, even_results, is_even=True), name),
            Form.STACKED: jit(
                constrain(stacked, stacked_results, is_even=True), f"{name}s"
            ),
            Form.GLOBAL: jit_for_shape(
                constrain(self._run_global_batch),
                f"{name}_{Form.GLOBAL.value}",
                out_shardings=None if is_placed or has_cores else mesh.whole,
            ),
            Form.RAGGED: jit_for_shape(
                ragged if has_rows else constrain(ragged),
                f"{name}_{Form.RAGGED.value}",
            ),
        }

    def _run_even_rows(
        self, is_stacked: bool, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        """Runs the step on each replica's rows of one or of several batches."""
        step = self._router.find_record(data, is_stacked).traced
        if not self._returns_rows:
            # Train and test steps end with sums.
            step.combine_sums(self._mesh)
        body = self._map_step(step, self._mapped_layout, stacked=is_stacked)
        return body(written, read, data)

    @property
    def _mapped_layout(self) -> Layout:
        """The layout of mapped programs."""
        has_sums = bool(self._layout.local_sums)
        is_other = has_sums != self._router.kind.sums_later
        return PLAIN if is_other or self._is_kept is False else self._layout

    def _map_step(
        self, step: Step, layout: Layout = PLAIN, *, stacked: bool
    ) -> Step:
        """Maps a step over the replicas, for one batch or stacked batches.

        Args:
          step: The step, for a state with Keras's layout.
          layout: The layout of the state.
          stacked: Whether the step receives stacked batches.
        """
        mesh, replicated = self._mesh, replicated_spec()
        split = split_spec(mesh, dim=int(stacked and not self._is_sharded))
        results = split if self._returns_rows else replicated

        def map_replicas(body: Step, *state: Any) -> Step:
            specs, result_specs = (*state, split), (results, *state)
            return sharded_map(
                body, mesh, in_specs=specs, out_specs=result_specs
            )

        if self._is_sharded:
            # The loop over stacked batches is around the mapped step.
            body = map_replicas(step, *self._divide(self._specs))
            body = keep_slots_on_host(layout.wrap_step(body))
            return self._scan(body) if stacked else body
        step = keep_slots_on_host(layout.wrap_step(step))
        body = layout.wrap_loop(self._scan(step) if stacked else step)
        return map_replicas(body, layout.find_specs(), replicated)

    def _run_global_batch(
        self, written: Group, read: Group, data: Batch, shape: RowShape
    ) -> tuple[Any, ...]:
        """Runs the step on all rows of one or several batches, unpadded."""
        body = self._global_body
        fn = self._scan(body) if shape.steps > 1 else body
        return call_on_global_batch(
            fn, (written, read), data, shape, self._mesh
        )

    def _run_ragged_rows(
        self, written: Group, read: Group, data: Batch, shape: RowShape
    ) -> tuple[Any, ...]:
        """Runs the step on each replica's rows, without padding.

        The replicas may have different numbers of rows.
        """
        mesh, axis = self._mesh, int(shape.steps > 1)
        padded = jax.tree.leaves(data)[0].shape[axis]
        counts, taken, returned = assign_rows(shape, padded, mesh.num_replicas)
        step = functools.partial(self._ragged_step, counts)
        step = combine_sums(step, mesh)
        body = self._map_step(step, stacked=shape.steps > 1)
        data = move_rows(data, taken, axis, mesh)
        results, *state = body(written, read, data)
        if self._returns_rows:
            results = move_rows(results, returned, axis, mesh)
        return results, *state

    def _run(self, state: Groups, segment: Segment) -> tuple[Any, Groups]:
        """Runs one program and returns its results and the new state."""
        results, new, changed = self._start(
            functools.partial(dispatch, self._mesh), state, segment
        )
        read = map(merge_lib.apply_changes, self._divide(state)[1], changed)
        return results, tuple(self._order_groups(new, read))

    def lower(self, state: Groups, segment: Segment) -> jax.stages.Lowered:
        """Lowers the program that a call would run; accepts abstract arrays."""
        with kernels_for(self._mesh):
            return self._start(compiled.lower, state, segment)

    def _start(
        self, call: Callable[..., Any], state: Groups, segment: Segment
    ) -> Any:
        """Calls `call(program, *args)` with the program that runs batches.

        Args:
          call: A function that runs a jitted function, or lowers it.
          state: The state of the step.
          segment: The batches.

        Returns:
          What `call` returns.
        """
        route = self.find_route(segment)
        if route.is_mapped and self._is_kept is None:
            args = self._arguments(route, state, segment)
            self._programs[route.form].trace(*args)
            self._is_kept = self._layout.is_kept
        args = self._arguments(route, state, segment)
        program = self._programs[route.form]
        if route.reason is not None:
            self._router.use_global_batch(route, lambda: program.trace(*args))
        return call(program, *args)

    def _arguments(
        self, route: Route, state: Groups, segment: Segment
    ) -> tuple[Any, ...]:
        """Returns the arguments of a route's program, in its layout."""
        is_packed = route.is_mapped and self._mapped_layout is not PLAIN
        self._layout.convert(dict(enumerate(state)), is_packed=is_packed)
        shape = () if route.is_mapped else (segment.shape,)
        return *self._divide(state), segment.data, *shape

    def _divide(self, groups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        written = [groups[i] for i in self._written]
        return written, [groups[i] for i in self._read]

    def _order_groups(
        self, written: Iterable[Any], read: Iterable[Any]
    ) -> list[Any]:
        places = (*self._written, *self._read)
        groups = dict(zip(places, (*written, *read), strict=True))
        return [groups[i] for i in range(len(places))]

    def _select_changes(
        self, old: Sequence[Group], new: Sequence[Group]
    ) -> tuple[list[Any], list[Any]]:
        written = [
            [merge_lib.cast_like(*p) for p in zip(new[i], old[i], strict=True)]
            for i in self._written
        ]
        return written, [
            merge_lib.find_changes(old[i], new[i]) for i in self._read
        ]

    def _replica_body(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        """Runs the step on a replica, and combines the replicas' states."""
        if step.num_replicas == 1:
            return self._global_body(written, read, data, step)
        old = self._order_groups(written, read)
        results, new = call_on_replica(
            step,
            self._model_call.on_replica,
            self._variables,
            old,
            data,
            metrics=self._metrics,
            local_sums=self._mapped_layout.local_sums,
        )
        return results, *self._select_changes(old, new)

    def _global_body(
        self,
        written: Group,
        read: Group,
        data: Batch,
        step: StepContext | None = None,
    ) -> tuple[Any, ...]:
        old = self._order_groups(written, read)
        results, new = self._model_call.on_global_batch(
            old, data, self._router.global_reason or _INDIVISIBLE, step
        )
        return results, *self._select_changes(old, new)

    def _ragged_step(
        self, counts: tuple[int, ...], written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        """Runs the step on replicas with different numbers of rows."""
        old = self._order_groups(written, read)
        results, new = call_step(
            self._model_call.on_replica,
            self._variables,
            old,
            data,
            mesh=self._mesh,
            counts=counts,
            metrics=self._metrics,
        )
        return results, *self._select_changes(old, new)
