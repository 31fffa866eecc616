"""The compiled program of predict steps.

A batch that the replicas cannot share evenly runs with its padding, which no
row's prediction can see, and the padding is cut off on the host. A model
with an output that is not one entry for each row (several, or none) runs its
step once over the whole batch: only so is the order of the entries known.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.batches import Segment
from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.jaxprs.specs import Spec
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import split_spec
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.hooks import seeds
from keras_strategies.keras_bridge.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.models.attention import attention_for
from keras_strategies.keras_bridge.step_context import (
    Batch,
    ReplicaScope,
    StepContext,
    StepFacts,
    step_scope,
)
from keras_strategies.keras_bridge.steps import output_shardings
from keras_strategies.keras_bridge.steps.mapped_program import (
    Body,
    MappedProgram,
    NotMapped,
    in_replica,
    jitted,
    mapped_trace,
    mapper,
    over_uneven_replicas,
    over_whole_batch,
    whole_trace,
)
from keras_strategies.keras_bridge.steps.trace_checks import eval_with_rows
from keras_strategies.keras_bridge.steps.uneven_step import call_step
from keras_strategies.keras_bridge.variables.shardings import divides, spec_of

PredictState = tuple[list[Any], list[Any]]


class PredictProgram:
    """The programs of a model's predict step.

    Args:
      step: `step(state, data) -> (outputs, non_trainable)`.
      variables: The model's trainable and non-trainable variables.
      mesh: The replicas.
      is_whole: Whether the step must see the whole batch at once.
      replica_scope: Makes a step's replica context current for a block.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        variables: tuple[list[keras.Variable], ...],
        *,
        mesh: ReplicaMesh,
        is_whole: bool = False,
        replica_scope: ReplicaScope | None = None,
    ) -> None:
        self._step = step
        self._replica_scope = replica_scope
        self._groups = variables
        self._variables = variables[1]
        self._mesh = mesh
        placed = functools.partial(
            output_shardings.prediction, variables=self._variables, mesh=mesh
        )
        is_divided = divides([v for g in variables for v in g], mesh)
        specs = [[spec_of(v, mesh) for v in group] for group in variables]
        results = functools.partial(_result_specs, mesh, specs[1])
        mapped = mapper(
            mesh,
            (specs[0], specs[1]),
            results,
            _scanned,
            splits_results=True,
        )

        one = mapped(self._replica_step, False)
        many = mapped(self._replica_step, True)
        each = over_uneven_replicas(
            mapped, self._uneven_step, mesh, returns_rows=True
        )
        whole = over_whole_batch(self._whole_body, _scanned, mesh)
        self._programs = MappedProgram(
            one=jitted(placed(one, sharding=mesh.split), "predict_step"),
            many=jitted(placed(many, sharding=mesh.stacked), "predict_steps"),
            whole=jitted(
                placed(whole, sharding=mesh.whole),
                "predict_step_whole",
                static_argnums=3,
                out_shardings=(
                    None
                    if is_divided or mesh.cores_per_replica > 1
                    else mesh.whole
                ),
            ),
            uneven=jitted(each, "predict_step_uneven", static_argnums=3),
            is_whole=is_whole,
        )
        # Each of several processes returns all rows.
        self._gather = jax.jit(_same, out_shardings=mesh.whole)

    def __call__(
        self, state: PredictState, segment: Segment
    ) -> Iterator[tuple[Any, PredictState]]:
        """Predicts the segment's rows; yields outputs, rows first, state."""
        call = functools.partial(dispatch, self._mesh)
        outputs, changed = self._start(call, state, segment)
        if changed:
            state = (state[0], merge_lib.with_changes(state[1], changed))
        yield self._rows(outputs, segment), state

    def _rows(self, outputs: Any, segment: Segment) -> Any:
        is_by_rows = not self._programs.is_whole
        is_padded = is_by_rows and segment.is_padded
        if is_by_rows and self._mesh.num_processes > 1:
            (outputs,) = dispatch(self._mesh, self._gather, (outputs,))
        if segment.steps == 1 and not is_padded:
            return outputs

        def cut(output: jax.Array) -> np.ndarray:
            host = np.asarray(output)
            if segment.steps == 1:
                host = host[None]
            if is_padded:
                host = segment.shape.without_padding(host, 1)
            return host.reshape(-1, *host.shape[2:])

        return jax.tree.map(cut, outputs)

    def lower(self, state: PredictState, segment: Segment) -> Any:
        """Lowers the program that a call would run; of abstract arrays, too."""
        return self._start(
            lambda program, *args: program.lower(*args), state, segment
        )

    def _start(
        self, call: Callable[..., Any], state: PredictState, segment: Segment
    ) -> Any:
        args = (*state, segment.data)
        programs = self._programs
        if not (segment.is_padded and programs.is_uneven):
            result = programs.start(call, args, segment)
            if not (segment.is_padded and programs.is_uneven):
                return result
        # A replica must not meet others with its padding.
        return programs.start_whole(call, args, segment)

    def _replica_step(
        self, trainable: list[Any], old: list[Any], data: Batch
    ) -> Any:
        rows = jax.tree.leaves(data)[0].shape[0]
        step = StepContext(facts=StepFacts(mesh=self._mesh, rows=rows))
        if step.num_replicas == 1:
            return self._whole_body(trainable, old, data, step)
        with mapped_trace(step, self._step):
            return self._mapped_body(step, trainable, old, data)

    def _mapped_body(
        self,
        step: StepContext,
        trainable: list[Any],
        old: list[Any],
        data: Batch,
    ) -> Any:
        rows = step.facts.rows
        folded = seeds.fold_seeds(self._variables, old, step)
        if not self._has_known_outputs():
            # Their number may be that of the rows by chance, so it is looked
            # at with twice as many.
            probe = step.probe(2 * rows)
            body = functools.partial(self._predict, probe)
            more, _ = eval_with_rows(2 * rows, body, (trainable, folded), data)
            if not _is_by_rows(more, 2 * rows):
                raise NotMapped(None)
        outputs, new = self._predict(step, trainable, folded, data)
        if step.notes.replica_uses:
            self._programs.is_uneven = True
        if not _is_by_rows(outputs, rows):
            raise NotMapped(None)
        plan = merge_lib.Merge(step=step)
        finish = merge_lib.plan_merge(plan, self._variables, old, folded, new)
        merged = finish(plan.sums())
        changed = {
            k: merge_lib.as_type_of(merged[int(k)], old[int(k)])
            for k in merge_lib.changed_values(folded, new)
        }
        return outputs, changed

    def _predict(
        self, step: StepContext, trainable: Any, state: Any, data: Batch
    ) -> tuple[Any, Any]:
        with (
            trace_hooks(),
            attention_for(self._mesh),
            step_scope(step),
            in_replica(self._replica_scope, step),
        ):
            return self._step((list(trainable), list(state)), data)

    def _uneven_step(
        self,
        counts: tuple[int, ...],
        trainable: list[Any],
        old: list[Any],
        data: Batch,
    ) -> Any:
        """The step of a replica, which may have fewer rows than others."""

        def step_fn(step: StepContext, state: Any, data: Batch) -> Any:
            outputs, new = self._predict(step, state[0], state[1], data)
            if not _is_by_rows(outputs, step.facts.rows):
                raise RuntimeError(
                    "A predict step that asks its replica context for other "
                    "replicas must return one entry for each row. Received: "
                    f"shapes {jax.tree.map(np.shape, outputs)} of "
                    f"{step.facts.rows} rows. Return rows, or make the "
                    "batches divisible by the replicas."
                )
            return outputs, (state[0], new)

        called = call_step(
            step_fn,
            self._groups,
            [trainable, old],
            data,
            mesh=self._mesh,
            counts=counts,
            metrics=None,
            averages=False,
        )
        outputs = jax.tree.unflatten(called.structure, called.outputs)
        return outputs, merge_lib.changed_values(old, called.state[1])

    def _has_known_outputs(self) -> bool:
        """Whether Keras says that all outputs have rows: a functional model."""
        model = getattr(self._step, "__self__", None)
        users = [
            cls
            for cls in type(model).__mro__
            if not cls.__module__.startswith("keras.")
        ]
        if any({"predict_step", "call"} & vars(cls).keys() for cls in users):
            return False
        outputs = getattr(model, "outputs", None)
        return bool(outputs) and all(o.shape[:1] == (None,) for o in outputs)

    def _whole_body(
        self,
        trainable: list[Any],
        old: list[Any],
        data: Batch,
        step: StepContext | None = None,
    ) -> Any:
        scope = self._replica_scope
        with whole_trace(self._mesh, scope, self._step, step):
            outputs, new = self._step((list(trainable), list(old)), data)
        return outputs, merge_lib.changed_values(old, new)


def _scanned(body: Body) -> Body:
    """The steps of several stacked batches as one program; all outputs."""

    def many(trainable: list[Any], old: list[Any], data: Batch) -> Any:
        keys: list[str] = []

        def one(carry: list[Any], batch: Batch) -> Any:
            outputs, changed = body(trainable, carry, batch)
            keys[:] = list(changed)
            return merge_lib.with_changes(carry, changed), outputs

        carry, outputs = jax.lax.scan(one, list(old), data)
        return outputs, {k: carry[int(k)] for k in keys}

    return many


def _result_specs(mesh: ReplicaMesh, specs: list[Spec], results: Any) -> Any:
    _, changed = results
    return split_spec(mesh), {k: specs[int(k)] for k in changed}


def _same(value: Any) -> Any:
    return value


def _is_by_rows(outputs: Any, rows: int) -> bool:
    return all(np.shape(o)[:1] == (rows,) for o in jax.tree.leaves(outputs))
