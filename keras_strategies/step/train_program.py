"""The compiled programs of train and test steps."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from keras_strategies._types import Batch, Groups, Logs
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import seeds, summands
from keras_strategies.hooks.local_sums import OPTIMIZER
from keras_strategies.keras_bridge.step_context import (
    Group,
    StepContext,
    SumsNeeded,
)
from keras_strategies.passes import traces
from keras_strategies.spmd.batches import Segment, unstack_steps
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.identity import IdentityMap
from keras_strategies.spmd.replica_map import (
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.step import step_logs
from keras_strategies.step.array_groups import PLAIN, Forms
from keras_strategies.step.mapped_program import Arguments, Body
from keras_strategies.step.model_program import ModelProgram
from keras_strategies.step.stacked_state import StacksNotKept
from keras_strategies.step.trace_checks import (
    StepsNotFused,
    forget_losses,
    trace_and_check,
)
from keras_strategies.step.traced import Traced
from keras_strategies.step.uneven_step import UnevenCall


class StepProgram(ModelProgram):
    """The programs of a model's train or test step, which return logs.

    Args:
      *args: See `ModelProgram`.
      forms: The forms in which steps may store arrays.
      **options: See `ModelProgram`.
    """

    def __init__(
        self,
        *args: Any,
        forms: Forms = PLAIN,
        **options: Any,
    ) -> None:
        self._local_sums, self._stacks = forms.local_sums, forms.stacks
        self._sums_later = forms.local_sums is not None
        super().__init__(*args, **options)
        self._unstack = jax.jit(
            unstack_steps, static_argnums=1, out_shardings=self._mesh.split
        )
        self._is_fused = True

    def __call__(
        self, state: Groups, segment: Segment
    ) -> Iterator[tuple[Any, Groups]]:
        """Runs the steps of stacked batches, in one program or in several.

        Yields:
          After each program, the logs of the program's last step, and the new
          state. The program has donated the earlier state, so the caller must
          store the new state immediately.
        """
        if segment.steps == 1 or self._is_fused:
            try:
                yield self._run(state, segment)
                return
            except StepsNotFused:
                self._is_fused = False
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
        try:
            return super()._start(call, state, segment)
        except SumsNeeded:
            self._sums_later = False
        except StacksNotKept:
            if self._stacks is not None:
                self._stacks.convert(state, is_stacked=False)
            self._stacks = None
        forget_losses(self._step)
        self._programs = self._make_programs(
            self._name, self._programs.is_global
        )
        return super()._start(call, state, segment)

    def _arguments(self, state: Groups, segment: Segment) -> Arguments:
        local, stacks = self._local_sums, self._stacks
        if local is None and stacks is None:
            return super()._arguments(state, segment)

        def arguments(is_mapped: bool) -> tuple[Any, Any, Any]:
            if stacks is not None:
                stacks.convert(state, is_stacked=is_mapped)
            groups = list(state)
            if local is not None:
                groups[OPTIMIZER] = local.convert(
                    state[OPTIMIZER],
                    is_stacked=is_mapped and self._sums_later,
                )
            return (*self._divide(groups), segment.data)

        return arguments

    def _find_shardings(self, is_even: bool) -> Sequence[Sequence[Any]]:
        if is_even and self._stacks is not None:
            return self._stacks.find_shardings()
        return super()._find_shardings(is_even)

    def _map_even_step(self, stacked: bool) -> Body:
        local, step = self._local_sums, self._replica_step
        if self._stacks is not None:
            on_state = functools.partial(
                self._stacks.on_stacks, written=self._written
            )
            return self._map_step(step, stacked=stacked, on_state=on_state)
        if local is None or not self._sums_later:
            return super()._map_even_step(stacked)
        replicated, place = replicated_spec(), self._written.index(OPTIMIZER)
        written: list[Any] = [replicated for _ in self._written]
        written[place] = local.specs_of(self._variables[OPTIMIZER])
        return replica_map(
            local.on_replicas(
                self._scan_steps(step) if stacked else step, place
            ),
            self._mesh,
            in_specs=(
                written,
                replicated,
                split_spec(self._mesh, dim=int(stacked)),
            ),
            out_specs=(replicated, written, replicated),
        )

    def _mapped_body(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        return trace_and_check(
            step,
            self._replica_body,
            (written, read),
            data,
            functools.partial(self._check_uses, step),
            is_user_step=traces.is_user_function(self._step),
        )

    def _check_uses(self, step: StepContext, jaxpr: ClosedJaxpr) -> None:
        local = self._local_sums
        if local is not None and step.notes.summands:
            sizes = [len(self._variables[i]) for i in self._written]
            start = sum(sizes[: self._written.index(OPTIMIZER)])
            places = [start + i for i in local.places]
            summands.check_uses(jaxpr, places, sum(sizes))

    def _replica_body(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        old = self._order_groups(written, read)
        folded = [
            seeds.fold_seeds(variables, values, step)
            for variables, values in zip(self._variables, old, strict=True)
        ]
        self._begin_sums(step, folded)
        metrics = self._variables[-1]
        step.notes.before = IdentityMap(zip(metrics, folded[-1], strict=True))
        logs, new = self._on_rows(step, folded, data)
        if step.facts.is_probe:
            # The extra trace for checks has no merge rules, and merges nothing.
            return logs
        if step.notes.summands:
            group = self._variables[OPTIMIZER]
            summands.check_new(step, group, new[OPTIMIZER])
        # If the step resets a metric, the metric's change is measured from its
        # value after the last reset.
        folded[-1] = [step.notes.before[v] for v in metrics]
        return self._merge(step, old, folded, new, logs)

    def _begin_sums(self, step: StepContext, state: Sequence[Group]) -> None:
        local = self._local_sums
        if local is not None and self._sums_later:
            summands.begin(
                step,
                local.accumulators,
                self._variables[OPTIMIZER],
                state[OPTIMIZER],
            )

    def _on_rows(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        model = getattr(self._step, "__self__", None)
        tracker = getattr(model, "_loss_tracker", None)
        step = step.with_facts(loss_tracker=tracker)
        return self._call_in_replica(step, state, data)

    def _uneven_results(self, called: UnevenCall) -> Logs:
        metrics = zip(self._variables[-1], called.state[-1], strict=True)
        logs = step_logs.read_logs(
            called.outputs, called.means, called.results, list(metrics)
        )
        return jax.tree.unflatten(called.structure, logs)

    def _merge(
        self,
        step: StepContext,
        old: Sequence[Group],
        folded: Sequence[Group],
        new: Sequence[Group],
        logs: Logs,
    ) -> tuple[Any, ...]:
        plan = merge_lib.Merge(step=step)
        metrics, starts = self._variables[-1], [*old[:-1], folded[-1]]
        groups = zip(self._variables, starts, folded, new, strict=True)
        finishers = [
            merge_lib.plan_merge(plan, *group, are_metrics=group[0] is metrics)
            for group in groups
        ]
        places = [
            (v, plan.add(step_logs.compute_share(step, v)))
            for v in step_logs.find_averaged_logs(step, logs)
        ]
        sums = plan.compute_sums()
        merged = [finish(sums) for finish in finishers]
        means = IdentityMap((v, sums[place]) for v, place in places)
        logs = step_logs.merge_logs(
            step, logs, metrics, (new[-1], merged[-1]), means
        )
        return logs, *self._select_changes(old, merged)

    def _scan_steps(self, body: Body) -> Body:
        """Turns a step into a loop over batches that returns the last logs."""

        def many(written: Group, read: Group, data: Batch) -> tuple[Any, ...]:
            changed_keys: list[list[str]] = []

            def one(carry: tuple[Any, Any], batch: Batch) -> tuple[Any, Any]:
                logs, written, changed = body(carry[0], carry[1], batch)
                changed_keys[:] = [list(values) for values in changed]
                read = map(merge_lib.apply_changes, carry[1], changed)
                return (written, list(read)), logs

            carry = (written, read)
            first = jax.tree.map(lambda a: a[0], data)
            traced = Traced(one, carry, first)
            trains = 0 in self._written
            on_cpu = self._mesh.platform == "cpu"
            if trains and on_cpu and traces.has_convolutions(traced.jaxpr):
                raise StepsNotFused
            (written, read), logs = jax.lax.scan(traced, carry, data)
            changed = [
                {k: group[int(k)] for k in keys}
                for group, keys in zip(read, changed_keys, strict=True)
            ]
            return jax.tree.map(lambda a: a[-1], logs), written, changed

        return many
