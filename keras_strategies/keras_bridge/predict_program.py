"""The compiled program of predict steps.

A batch that the replicas cannot share evenly runs with its padding, which no
row's prediction can see, and the padding is cut off on the host.
"""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.batches import Segment
from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    replica_map,
    split_spec,
    whole_spec,
)
from keras_strategies._core.step_context import StepContext, step_scope
from keras_strategies.keras_bridge import state as state_lib
from keras_strategies.keras_bridge.programs import changed_values
from keras_strategies.keras_bridge.trace_hooks import trace_hooks

PredictState = tuple[list[Any], list[Any]]


class PredictProgram:
    """The programs of a model's predict step.

    Args:
      step: `step(state, data) -> (outputs, non_trainable)`.
      non_trainable: The model's non-trainable variables.
      mesh: The replicas.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        non_trainable: list[keras.Variable],
        *,
        mesh: ReplicaMesh,
    ) -> None:
        self._step = step
        self._variables = non_trainable
        self._mesh = mesh
        self._one = jax.jit(self._mapped(self._replica_step, stacked=False))
        self._many = jax.jit(self._mapped(self._scanned_step, stacked=True))

    def __call__(
        self, state: PredictState, segment: Segment
    ) -> tuple[Any, PredictState]:
        """Predicts the segment's rows; returns outputs, rows first, state."""
        fn = self._one if segment.steps == 1 else self._many
        outputs, changed = dispatch(
            self._mesh, fn, *state, segment.data
        )
        if changed:
            group = list(state[1])
            for k, value in changed.items():
                group[int(k)] = value
            state = (state[0], group)
        return self._rows(outputs, segment), state

    def _rows(self, outputs: Any, segment: Segment) -> Any:
        padded = jax.tree.leaves(segment.data)[0].shape[segment.steps > 1]
        if segment.steps == 1 and padded == segment.rows:
            return outputs

        def cut(output: jax.Array) -> np.ndarray:
            host = np.asarray(output)
            if segment.steps == 1:
                host = host[None]
            # An output may hold several entries for a row.
            entries = host.shape[1] // padded * segment.rows
            return host[:, :entries].reshape(-1, *host.shape[2:])

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

    def _replica_step(
        self, trainable: list[Any], old: list[Any], data: Any
    ) -> Any:
        rows = jax.tree.leaves(data)[0].shape[0]
        step = StepContext(mesh=self._mesh, rows=rows)
        if step.num_replicas == 1:
            outputs, new = self._step((list(trainable), list(old)), data)
            return outputs, changed_values(old, new)
        folded = state_lib.fold_seeds(self._variables, old, step)
        with trace_hooks(), step_scope(step):
            outputs, new = self._step((list(trainable), list(folded)), data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            if not leaf.shape or leaf.shape[0] % rows:
                raise ValueError(
                    "Every output of a distributed `predict` must have the "
                    "batch's rows as its first dimension. Received: output "
                    f"{jax.tree_util.keystr(path) or '0'} of shape "
                    f"{leaf.shape} for {rows} rows. Return one entry for "
                    "each row, or call the model directly."
                )
        plan = state_lib.Merge(step=step)
        finish = state_lib.plan_merge(plan, self._variables, old, folded, new)
        merged = finish(plan.sums())
        changed = {
            k: state_lib.as_type_of(merged[int(k)], old[int(k)])
            for k in changed_values(folded, new)
        }
        return outputs, changed

    def _scanned_step(
        self, trainable: list[Any], old: list[Any], data: Any
    ) -> Any:
        keys: list[str] = []

        def one(carry: list[Any], batch: Any) -> Any:
            outputs, changed = self._replica_step(trainable, carry, batch)
            keys[:] = list(changed)
            carry = list(carry)
            for k, value in changed.items():
                carry[int(k)] = value
            return carry, outputs

        carry, outputs = jax.lax.scan(one, list(old), data)
        return outputs, {k: carry[int(k)] for k in keys}
