"""One compiled program per kind of step: train, test, predict.

A batch that the replicas share evenly goes through the model's own step,
mapped over the replicas. Any other batch goes through the same step once,
over the whole batch, with its rows still divided over the devices by XLA:
exact for every loss, metric and layer, and no device holds more than its
share (docs/architecture.md).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_strategies._core.batches import Segment, unstacked
from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.identity import IdentityMap
from keras_strategies._core.jaxprs.specs import Divided, Spec
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import has_convolutions, whole_spec
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.hooks import seeds
from keras_strategies.keras_bridge.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.models.attention import attention_for
from keras_strategies.keras_bridge.step_context import (
    Batch,
    Group,
    Logs,
    ReplicaScope,
    State,
    StepContext,
    StepFacts,
    step_scope,
)
from keras_strategies.keras_bridge.steps import output_shardings, step_logs
from keras_strategies.keras_bridge.steps.mapped_program import (
    MappedProgram,
    in_replica,
    jitted,
    mapped_trace,
    mapper,
    over_uneven_replicas,
    over_whole_batch,
    whole_trace,
)
from keras_strategies.keras_bridge.steps.trace_checks import (
    StepsNotFused,
    Traced,
    traced_once,
)
from keras_strategies.keras_bridge.steps.uneven_step import call_step
from keras_strategies.keras_bridge.variables.shardings import spec_of

Step = Callable[..., Any]


class StepProgram:
    """The programs of one kind of step of one model.

    Args:
      step: `step(state, data) -> (logs, state)`; the model's own.
      name: The programs' name, in profiles.
      variables: State of the model's variables, aligned with the state.
      metrics: Index of the group that holds metrics, or None.
      written: Indices of the groups that the step writes as a rule; they are
        donated. Of other groups only what changed is returned.
      mesh: The replicas.
      is_whole: Whether the step must see the whole batch at once.
      replica_scope: Makes a step's replica context current for a block.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        variables: tuple[list[keras.Variable], ...],
        *,
        metrics: int,
        written: tuple[int, ...],
        mesh: ReplicaMesh,
        is_whole: bool = False,
        replica_scope: ReplicaScope | None = None,
    ) -> None:
        self._step = step
        self._replica_scope = replica_scope
        self._variables = variables
        self._metrics = metrics
        self._written = written
        self._mesh = mesh
        self._read = tuple(i for i in range(len(variables)) if i not in written)
        self._programs = self._made(name, is_whole)
        self._unstack = jax.jit(
            unstacked, static_argnums=1, out_shardings=mesh.split
        )
        self._is_fused = True

    def _made(self, name: str, is_whole: bool) -> MappedProgram:
        mesh = self._mesh
        placed = functools.partial(
            output_shardings.step,
            written=[self._variables[i] for i in self._written],
            read=[self._variables[i] for i in self._read],
            mesh=mesh,
        )
        specs = [[spec_of(v, mesh) for v in group] for group in self._variables]
        is_divided = any(isinstance(s, Divided) for g in specs for s in g)
        results = functools.partial(self._result_specs, specs)
        mapped = mapper(
            mesh,
            self._divide(specs),
            results,
            self._scanned,
            splits_results=False,
        )

        one = mapped(self._replica_step, False)
        many = mapped(self._replica_step, True)
        whole = over_whole_batch(self._whole_body, self._scanned, mesh)
        is_placed = is_divided or mesh.cores_per_replica > 1
        each = over_uneven_replicas(
            mapped, self._uneven_step, mesh, returns_rows=False
        )
        of_shapes = functools.partial(
            jitted, donate_argnums=0, static_argnums=3
        )
        return MappedProgram(
            one=jitted(placed(one), name, donate_argnums=0),
            many=jitted(placed(many), f"{name}s", donate_argnums=0),
            whole=of_shapes(
                placed(whole),
                f"{name}_whole",
                out_shardings=None if is_placed else mesh.whole,
            ),
            uneven=of_shapes(placed(each), f"{name}_uneven"),
            is_whole=is_whole,
        )

    def _result_specs(self, specs: list[list[Spec]], results: Any) -> Any:
        _, _, changed = results
        written, read = self._divide(specs)
        of_changed = [
            {k: group[int(k)] for k in values}
            for group, values in zip(read, changed, strict=True)
        ]
        return whole_spec(), written, of_changed

    def __call__(
        self, state: State, segment: Segment
    ) -> Iterator[tuple[Any, State]]:
        """Runs the segment's steps, in one program or in several.

        Yields:
          After each program its last step's logs, and the state: the one
          before is gone, so whoever is interrupted must have taken this one.
        """
        if segment.steps > 1 and self._is_fused:
            try:
                yield self._run(state, segment)
                return
            except StepsNotFused:
                self._is_fused = False
        if segment.steps == 1:
            yield self._run(state, segment)
            return
        batches = dispatch(
            self._mesh, self._unstack, segment.data, segment.steps
        )
        for data in batches:
            one = dataclasses.replace(segment, data=data, steps=1)
            logs, state = self._run(state, one)
            yield logs, state

    def _run(self, state: State, segment: Segment) -> tuple[Any, State]:
        logs, new, changed = self._start(
            functools.partial(dispatch, self._mesh), state, segment
        )
        return logs, self._joined(state, new, changed)

    def _start(
        self, call: Callable[..., Any], state: State, segment: Segment
    ) -> Any:
        args = self._arguments(state, segment)
        is_shared = not segment.is_padded
        return self._programs.start(call, args, segment, is_shared=is_shared)

    def lower(self, state: State, segment: Segment) -> Any:
        """Lowers the program that a call would run; of abstract arrays, too."""
        return self._start(_lower, state, segment)

    def lower_whole(self, state: State, segment: Segment) -> Any:
        """Lowers the program of an indivisible batch."""
        args = self._arguments(state, segment)
        return self._programs.start_whole(_lower, args, segment)

    def _arguments(self, state: State, segment: Segment) -> Any:
        return *self._divide(state), segment.data

    def _divide(self, state: Any) -> tuple[list[Any], list[Any]]:
        written = [state[i] for i in self._written]
        return written, [state[i] for i in self._read]

    def _joined(
        self, state: State, new: Group, changed: list[dict[str, Any]]
    ) -> State:
        read = [
            merge_lib.with_changes(state[i], values) if values else state[i]
            for i, values in zip(self._read, changed, strict=True)
        ]
        return tuple(self._ordered(new, read))

    # Steps as pure functions: (written, read, data) -> (logs, written,
    # changed), where `changed` maps positions in a read group to new values.

    def _replica_step(self, written: Group, read: Group, data: Batch) -> Any:
        rows = jax.tree.leaves(data)[0].shape[0]
        step = StepContext(facts=StepFacts(mesh=self._mesh, rows=rows))
        if step.num_replicas == 1:
            return self._whole_body(written, read, data, step)
        with mapped_trace(step, self._step):
            return traced_once(step, self._replica_body, (written, read), data)

    def _replica_body(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> Any:
        old = self._ordered(written, read)
        folded = [
            seeds.fold_seeds(variables, values, step)
            for variables, values in zip(self._variables, old, strict=True)
        ]
        model = getattr(self._step, "__self__", None)
        tracker = getattr(model, "_loss_tracker", None)
        step = step.with_facts(loss_tracker=tracker)
        metrics = self._variables[self._metrics]
        step.notes.before = IdentityMap(
            zip(metrics, folded[self._metrics], strict=True)
        )
        logs, new = self._traced(step, folded, data)
        if step.facts.is_probe:
            # Metrics have no rules in it, and nothing is merged.
            return logs
        # A metric that the step has reset started anew.
        folded[self._metrics] = [step.notes.before[v] for v in metrics]
        return self._merged(step, old, folded, new, logs)

    def _traced(self, step: StepContext, state: Any, data: Batch) -> Any:
        """The model's step in a replica's trace."""
        with (
            trace_hooks(),
            attention_for(self._mesh),
            step_scope(step),
            in_replica(self._replica_scope, step),
        ):
            return self._step(tuple(map(list, state)), data)

    def _uneven_step(
        self,
        counts: tuple[int, ...],
        written: Group,
        read: Group,
        data: Batch,
    ) -> Any:
        """The step of a replica, which may have fewer rows than others."""
        old = self._ordered(written, read)
        model = getattr(self._step, "__self__", None)
        tracker = getattr(model, "_loss_tracker", None)

        def step_fn(step: StepContext, state: Any, data: Batch) -> Any:
            return self._traced(
                step.with_facts(loss_tracker=tracker), state, data
            )

        called = call_step(
            step_fn,
            self._variables,
            old,
            data,
            mesh=self._mesh,
            counts=counts,
            metrics=self._metrics,
            averages=True,
        )
        metrics = zip(
            self._variables[self._metrics],
            called.state[self._metrics],
            strict=True,
        )
        logs = called.logs(list(metrics))
        return logs, *self._output(old, called.state)

    def _merged(
        self, step: StepContext, old: Any, folded: Any, new: Any, logs: Logs
    ) -> Any:
        plan = merge_lib.Merge(step=step)
        finishers = [
            merge_lib.plan_merge(
                plan,
                variables,
                folded[i] if i == self._metrics else old[i],
                folded[i],
                new[i],
                are_metrics=i == self._metrics,
            )
            for i, variables in enumerate(self._variables)
        ]
        places = [
            (v, plan.add(v / step.num_replicas))
            for v in step_logs.averaged_logs(step, logs)
        ]
        sums = plan.sums()
        merged = [finish(sums) for finish in finishers]
        means = IdentityMap((v, sums[place]) for v, place in places)
        metrics = self._variables[self._metrics]
        logs = step_logs.merged_logs(
            step,
            logs,
            metrics,
            (new[self._metrics], merged[self._metrics]),
            means,
        )
        return logs, *self._output(old, merged)

    def _whole_body(
        self,
        written: Group,
        read: Group,
        data: Batch,
        step: StepContext | None = None,
    ) -> Any:
        old = self._ordered(written, read)
        scope = self._replica_scope
        with whole_trace(self._mesh, scope, self._step, step):
            logs, new = self._step(tuple(map(list, old)), data)
        return logs, *self._output(old, new)

    def _scanned(self, body: Step) -> Step:
        """The steps of several stacked batches as one program; last logs."""

        def many(written: Group, read: Group, data: Batch) -> Any:
            changed_keys: list[list[str]] = []

            def one(carry: Any, batch: Batch) -> Any:
                logs, written, changed = body(*carry, batch)
                changed_keys[:] = [list(values) for values in changed]
                read = map(merge_lib.with_changes, carry[1], changed)
                return (written, list(read)), logs

            carry = (written, read)
            first = jax.tree.map(lambda a: a[0], data)
            traced = Traced(one, carry, first)
            trains = 0 in self._written
            on_cpu = self._mesh.platform == "cpu"
            if trains and on_cpu and has_convolutions(traced.jaxpr):
                raise StepsNotFused
            (written, read), logs = jax.lax.scan(traced, carry, data)
            changed = [
                {k: group[int(k)] for k in keys}
                for group, keys in zip(read, changed_keys, strict=True)
            ]
            return jax.tree.map(lambda a: a[-1], logs), written, changed

        return many

    def _ordered(self, written: Group, read: Group) -> list[Any]:
        places = (*self._written, *self._read)
        groups = dict(zip(places, (*written, *read), strict=True))
        return [groups[i] for i in range(len(places))]

    def _output(self, old: Any, new: Any) -> tuple[list[Any], list[Any]]:
        written = [
            [
                merge_lib.as_type_of(n, o)
                for n, o in zip(new[i], old[i], strict=True)
            ]
            for i in self._written
        ]
        return written, [
            merge_lib.changed_values(old[i], new[i]) for i in self._read
        ]


def _lower(program: Any, *args: Any) -> Any:
    return program.lower(*args)
