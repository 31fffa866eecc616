"""Calls a model's step while it is traced, in the contexts that it needs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies._types import Batch
from keras_strategies.hooks.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.step_context import (
    Group,
    ReplicaScope,
    StepContext,
    StepFacts,
    count_replica_uses,
    step_scope,
)
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.passes.replay import separate_trace
from keras_strategies.passes.traces import is_tracing
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import split_tokens


class ModelCall:
    """A model's train, test or predict step, to be traced.

    Args:
      step: The model's step: `step(state, data) -> (results, state)`. A predict
        step returns only the second group of the state.
      mesh: The mesh of the replicas.
      replica_scope: Makes the context manager of a step's replica context.
      is_predict: Whether this is a predict step.

    Attributes:
      step: The model's step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: ReplicaMesh,
        replica_scope: ReplicaScope,
        *,
        is_predict: bool = False,
    ) -> None:
        self.step = step
        self._mesh, self._replica_scope = mesh, replica_scope
        self._is_predict = is_predict
        model = getattr(step, "__self__", None)
        self._model = model if isinstance(model, keras.Layer) else None

    def on_replica(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        """Calls the step on a replica's rows; returns (results, state)."""
        tracker = getattr(self._model, "_loss_tracker", None)
        step = step.with_facts(loss_tracker=tracker)
        with (
            trace_hooks(),
            kernels_for(self._mesh),
            step_scope(step),
            self._in_replica(step, is_global=False),
        ):
            return self._call(state, data)

    def on_global_batch(
        self,
        state: Sequence[Group],
        data: Batch,
        reason: str,
        step: StepContext | None = None,
    ) -> tuple[Any, Any]:
        """Calls the step on the rows of the global batch.

        Args:
          state: The state.
          data: The batch.
          reason: The reason why the step sees the global batch, for an error.
          step: The context of the trace, if the strategy has only one replica.

        Returns:
          The results, and the new state.
        """
        mesh = self._mesh
        if mesh.num_replicas > 1:
            facts = StepFacts(mesh=mesh, rows=1, global_reason=reason)
            step = StepContext(facts=facts)
        is_global = step is None or step.facts.global_reason is not None
        try:
            with (
                kernels_for(mesh, is_global=True),
                self._in_replica(step, is_global=is_global),
            ):
                return self._call(state, data)
        except BaseException:
            self.forget_losses()
            raise

    def _call(self, state: Sequence[Group], data: Batch) -> tuple[Any, Any]:
        self._forget_loss_ids()
        data = split_tokens(data, self._mesh)
        results, new = self.step(tuple(map(list, state)), data)
        return results, ((state[0], new) if self._is_predict else new)

    @contextlib.contextmanager
    def _in_replica(
        self, step: StepContext | None, *, is_global: bool
    ) -> Iterator[None]:
        """Makes a step's replica context current for a block."""
        # JAX must not reuse traces of inner functions from another replica
        # context; functions that used their context are traced again.
        kind = "whole" if is_global else "step"
        name = f"ks.{kind}.{count_replica_uses()}"
        cache = (
            separate_trace(name) if is_tracing() else contextlib.nullcontext()
        )
        with cache, self._replica_scope(step):
            yield

    def forget_losses(self) -> None:
        """Clears the losses that a failed trace left on the model.

        Keras stores the losses of a call on the model until the model's
        `compute_loss` reads them. Without this, the next trace would read the
        losses of the failed trace.
        """
        model: Any = self._model
        if getattr(model, "_losses_override", None):
            model._losses_override = []

    def _forget_loss_ids(self) -> None:
        """Clears the ids of losses that earlier traces left on the layers.

        In a trace, Keras (3.15) knows a layer's losses by their `id`, and keeps
        the ids after the trace. When it calls the layer in a later trace, it
        drops the losses with these ids, among which may be one of another
        layer: an object may have the id of one that is gone (docs/upstream.md).
        """
        if self._model is not None:
            for layer in self._model._flatten_layers():
                layer._loss_ids.clear()
