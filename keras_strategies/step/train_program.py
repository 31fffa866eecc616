"""The compiled programs of train and test steps."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from keras_strategies._types import Batch, Groups, Logs
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import seeds, summands
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.spmd.batches import Segment, unstack_steps
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.identity import IdentityMap
from keras_strategies.step import step_logs
from keras_strategies.step.model_program import ModelProgram
from keras_strategies.step.ragged_step import RaggedCall
from keras_strategies.step.record import TraceKind
from keras_strategies.step.route import Route
from keras_strategies.step.state.layout import OPTIMIZER, PLAIN, Layout, Step


class StepProgram(ModelProgram):
    """The programs of a model's train or test step, which return logs.

    Args:
      *args: See `ModelProgram`.
      layout: The layout of the state in mapped programs.
      **options: See `ModelProgram`.
    """

    def __init__(
        self, *args: Any, layout: Layout = PLAIN, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._layout, self._is_layout_known = layout, layout is PLAIN
        self._is_packed = True
        self._router.kind = TraceKind(sums_later=bool(layout.local_sums))
        sizes = [len(self._variables[i]) for i in self._written]
        # The weights and the other variables come before the optimizer's.
        places = [sum(sizes[:OPTIMIZER]) + i for i in layout.local_sums]
        self._router.summands = places, sum(sizes)
        self._unstack = jax.jit(
            unstack_steps, static_argnums=1, out_shardings=self._mesh.split
        )

    def __call__(
        self, state: Groups, segment: Segment
    ) -> Iterator[tuple[Any, Groups]]:
        """Runs the steps of stacked batches, in one program or in several.

        Yields:
          After each program, the logs of the program's last step, and the new
          state. The program has donated the earlier state, so the caller must
          store the new state immediately.
        """
        if segment.steps == 1 or not self.find_route(segment).is_split:
            yield self._run(state, segment)
            return
        batches = dispatch(
            self._mesh, self._unstack, segment.data, segment.steps
        )
        for data in batches:
            one = dataclasses.replace(segment, data=data, steps=1)
            logs, state = self._run(state, one)
            yield logs, state

    def _start(
        self, call: Callable[..., Any], state: Groups, segment: Segment
    ) -> Any:
        if not self._is_layout_known:
            self._find_layout(state, segment)
        return super()._start(call, state, segment)

    def _find_layout(self, state: Groups, segment: Segment) -> None:
        """Traces a mapped program, to find whether it keeps the layout."""
        route = self.find_route(segment)
        if route.is_mapped:
            args = self._arguments(route, state, segment)
            self._programs[route.form].trace(*args)
            self._is_packed = self._layout.is_kept
            self._is_layout_known = True

    def _arguments(
        self, route: Route, state: Groups, segment: Segment
    ) -> tuple[Any, ...]:
        is_packed = route.is_mapped and self._mapped_layout is not PLAIN
        self._layout.convert(state, is_packed=is_packed)
        return super()._arguments(route, state, segment)

    @property
    def _mapped_layout(self) -> Layout:
        """The layout of mapped programs."""
        has_sums = bool(self._layout.local_sums)
        is_used = self._is_packed and has_sums == self._router.kind.sums_later
        return self._layout if is_used else PLAIN

    def _merge_replicas(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        old = self._order_groups(written, read)
        folded = [
            seeds.fold_seeds(variables, values, step)
            for variables, values in zip(self._variables, old, strict=True)
        ]
        if step.facts.sums_later:
            summands.begin(step, self._layout.local_sums, folded[OPTIMIZER])
        metrics = self._variables[-1]
        step.notes.before = IdentityMap(zip(metrics, folded[-1], strict=True))
        logs, new = self._on_rows(step, folded, data)
        # If the step resets a metric, the metric's change is measured from its
        # value after the last reset.
        folded[-1] = [step.notes.before[v] for v in metrics]
        starts = [*old[:-1], folded[-1]]
        groups = [
            merge_lib.plan_group(step, *group, are_metrics=group[0] is metrics)
            for group in zip(self._variables, starts, folded, new, strict=True)
        ]
        averaged = list(step_logs.find_averaged_logs(step, logs))
        shares = [step_logs.compute_share(step, log) for log in averaged]
        merged, sums = merge_lib.combine(step, groups, shares)
        means = IdentityMap(zip(averaged, sums, strict=True))
        logs = step_logs.merge_logs(
            step, logs, metrics, (new[-1], merged[-1]), means
        )
        return logs, *self._select_changes(old, merged)

    def _on_rows(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        step = step.with_facts(loss_tracker=self._model_call.loss_tracker)
        return self._model_call.on_replica(step, state, data)

    def _ragged_results(self, called: RaggedCall) -> Logs:
        metrics = zip(self._variables[-1], called.state[-1], strict=True)
        logs = step_logs.read_logs(
            called.outputs, called.means, called.results, list(metrics)
        )
        return jax.tree.unflatten(called.structure, logs)

    def _scan_steps(self, body: Step) -> Step:
        """Turns a step into a loop over batches that returns the last logs."""

        def many(written: Group, read: Group, data: Batch) -> tuple[Any, ...]:
            changed_keys: list[list[str]] = []

            def one(carry: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
                logs, written, changed = body(carry[0], carry[1], batch)
                changed_keys[:] = [list(values) for values in changed]
                read = map(merge_lib.apply_changes, carry[1], changed)
                return (written, list(read)), logs

            (written, read), logs = jax.lax.scan(one, (written, read), data)
            changed = [
                {k: group[int(k)] for k in keys}
                for group, keys in zip(read, changed_keys, strict=True)
            ]
            return jax.tree.map(lambda a: a[-1], logs), written, changed

        return many
