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

from keras_strategies._core.batches import RowShape, Segment
from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    replica_map,
    split_spec,
    whole_spec,
)
from keras_strategies._core.step_context import StepContext, step_scope
from keras_strategies.keras_bridge import laid_out as laid_out_lib
from keras_strategies.keras_bridge import state as state_lib
from keras_strategies.keras_bridge.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.tracing import (
    eval_with_rows,
    forget_losses,
    reason_of,
    warn_of_whole,
    whole_batch,
)

PredictState = tuple[list[Any], list[Any]]


class PredictProgram:
    """The programs of a model's predict step.

    Args:
      step: `step(state, data) -> (outputs, non_trainable)`.
      non_trainable: The model's non-trainable variables.
      mesh: The replicas.
      is_whole: Whether the step must see the whole batch at once.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        non_trainable: list[keras.Variable],
        *,
        mesh: ReplicaMesh,
        is_whole: bool = False,
    ) -> None:
        self._step = step
        self._variables = non_trainable
        self._mesh = mesh
        self._traced: StepContext | None = None
        self._reason: str | None = None
        laid_out = functools.partial(
            laid_out_lib.prediction, variables=non_trainable, mesh=mesh
        )
        one = self._mapped(self._replica_step, stacked=False)
        self._one = jax.jit(laid_out(one, sharding=mesh.split))
        many = self._mapped(self._scanned(self._replica_step), stacked=True)
        self._many = jax.jit(laid_out(many, sharding=mesh.stacked))
        self._whole = jax.jit(
            laid_out(self._whole_step, sharding=mesh.whole),
            static_argnums=3,
            out_shardings=mesh.whole if mesh.cores_per_replica == 1 else None,
        )
        # Of several processes, each returns all rows.
        self._gather = jax.jit(_same, out_shardings=mesh.whole)
        self._is_by_rows = not is_whole

    def __call__(
        self, state: PredictState, segment: Segment
    ) -> Iterator[tuple[Any, PredictState]]:
        """Predicts the segment's rows; yields outputs, rows first, state."""
        outputs, changed = self._run(state, segment)
        if changed:
            group = list(state[1])
            for k, value in changed.items():
                group[int(k)] = value
            state = (state[0], group)
        yield self._rows(outputs, segment), state

    def _run(self, state: PredictState, segment: Segment) -> Any:
        if self._is_by_rows:
            fn = self._one if segment.steps == 1 else self._many
            try:
                return dispatch(self._mesh, fn, *state, segment.data)
            except Exception as error:
                self._give_up_mapping(error)
        try:
            result = dispatch(
                self._mesh, self._whole, *state, segment.data, segment.shape
            )
        finally:
            self._reason = None
        self._is_by_rows = False
        return result

    def _rows(self, outputs: Any, segment: Segment) -> Any:
        is_padded = self._is_by_rows and segment.is_padded
        if self._is_by_rows and self._mesh.num_processes > 1:
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

    def _mapped(
        self, body: Callable[..., Any], *, stacked: bool
    ) -> Callable[..., Any]:
        split = split_spec(self._mesh, dim=int(stacked))
        whole = whole_spec()
        return replica_map(
            body,
            self._mesh,
            in_specs=(whole, whole, split),
            out_specs=(split, whole),
        )

    def lower(self, state: PredictState, segment: Segment) -> Any:
        """Lowers the program that a call would run; of abstract arrays, too."""
        if self._is_by_rows:
            fn = self._one if segment.steps == 1 else self._many
            try:
                return fn.lower(*state, segment.data)
            except Exception as error:
                self._give_up_mapping(error)
        try:
            return self._whole.lower(*state, segment.data, segment.shape)
        finally:
            self._reason = None

    def _give_up_mapping(self, error: Exception) -> None:
        """Runs the step whole from now on, unless the error is another's."""
        if self._traced is None:
            raise error
        if not isinstance(error, _NotByRows):
            self._reason = self._traced.whole_reason or reason_of(error)
        self._traced = None
        forget_losses(self._step)

    def _replica_step(
        self, trainable: list[Any], old: list[Any], data: Any
    ) -> Any:
        rows = jax.tree.leaves(data)[0].shape[0]
        step = StepContext(mesh=self._mesh, rows=rows)
        if step.num_replicas == 1:
            return self._whole_body(trainable, old, data)
        self._traced = step
        folded = state_lib.fold_seeds(self._variables, old, step)
        if not self._has_known_outputs():
            # Their number may be that of the rows by chance, so it is looked
            # at with twice as many.
            probe = StepContext(mesh=self._mesh, rows=2 * rows, is_probe=True)
            body = functools.partial(self._predict, probe)
            more, _ = eval_with_rows(2 * rows, body, (trainable, folded), data)
            if not _is_by_rows(more, 2 * rows):
                raise _NotByRows
        outputs, new = self._predict(step, trainable, folded, data)
        if not _is_by_rows(outputs, rows):
            raise _NotByRows
        plan = state_lib.Merge(step=step)
        finish = state_lib.plan_merge(plan, self._variables, old, folded, new)
        merged = finish(plan.sums())
        changed = {
            k: state_lib.as_type_of(merged[int(k)], old[int(k)])
            for k in state_lib.changed_values(folded, new)
        }
        self._traced = None
        return outputs, changed

    def _predict(
        self, step: StepContext, trainable: Any, state: Any, data: Any
    ) -> tuple[Any, Any]:
        with trace_hooks(), step_scope(step):
            return self._step((list(trainable), list(state)), data)

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

    def _whole_step(
        self,
        trainable: list[Any],
        old: list[Any],
        data: Any,
        shape: RowShape,
    ) -> Any:
        body = self._whole_body
        if shape.steps > 1:
            body = self._scanned(body)
        outputs = whole_batch(body, (trainable, old), data, shape, self._mesh)
        if self._reason is not None:
            warn_of_whole(self._reason)
            self._reason = None
        return outputs

    def _whole_body(
        self, trainable: list[Any], old: list[Any], data: Any
    ) -> Any:
        outputs, new = self._step((list(trainable), list(old)), data)
        return outputs, state_lib.changed_values(old, new)

    def _scanned(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def many(trainable: list[Any], old: list[Any], data: Any) -> Any:
            keys: list[str] = []

            def one(carry: list[Any], batch: Any) -> Any:
                outputs, changed = body(trainable, carry, batch)
                keys[:] = list(changed)
                carry = list(carry)
                for k, value in changed.items():
                    carry[int(k)] = value
                return carry, outputs

            carry, outputs = jax.lax.scan(one, list(old), data)
            return outputs, {k: carry[int(k)] for k in keys}

        return many


def _same(value: Any) -> Any:
    return value


def _is_by_rows(outputs: Any, rows: int) -> bool:
    return all(np.shape(o)[:1] == (rows,) for o in jax.tree.leaves(outputs))


class _NotByRows(Exception):
    """Raised by a trace: an output's first dimension is not the rows."""
