"""Finds the program that runs a batch: traces, analyzes and decides."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from keras_strategies._types import Batch
from keras_strategies.hooks.summands import are_used_as_sums
from keras_strategies.passes import traces
from keras_strategies.spmd.batches import Segment
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step import analysis
from keras_strategies.step.analysis import Analysis
from keras_strategies.step.record import Record, StepTracer, TraceKind
from keras_strategies.step.route import Circumstances, Form, Route, decide


class Router:
    """Finds the routes of a step's batches, and remembers them.

    Args:
      tracer: Traces the step.
      step: The model's step.
      mesh: The mesh of the replicas.
      global_reason: The reason why the step must see the global batch, if this
        is known in advance.
      returns_rows: Whether the step's results have an entry for each row.
      is_training: Whether this is a train step.

    Attributes:
      global_reason: The reason why the step must see the global batch, or None.
      kind: The kind of trace from which the step's programs are made.
      summands: If each replica accumulates its own gradients: the places of
        these in the state, and the number of arrays of the state.
    """

    def __init__(
        self,
        tracer: StepTracer,
        step: Callable[..., Any],
        mesh: ReplicaMesh,
        *,
        global_reason: str | None,
        returns_rows: bool,
        is_training: bool,
    ) -> None:
        self.global_reason, self.kind = global_reason, TraceKind()
        self.summands: tuple[Sequence[int], int] = (), 0
        self._tracer, self._step, self._mesh = tracer, step, mesh
        self._returns_rows = returns_rows
        self._avoids_loops = is_training and mesh.platform == "cpu"
        self._analyzed: tuple[Record | None, Analysis] = None, Analysis()
        self._routes: dict[Hashable, Route] = {}

    def find_route(self, segment: Segment) -> Route:
        """Returns the route of batches; traces the step if it is not known.

        Raises:
          Exception: if the step's code fails, or cannot run.
        """
        if self.global_reason is not None:
            return Route(form=Form.GLOBAL)
        leaves, structure = jax.tree.flatten(segment.data)
        arrays = [(leaf.shape, leaf.dtype) for leaf in leaves]
        settings = traces.read_settings()
        key = (segment.rows, segment.steps, structure, settings, *arrays)
        if key not in self._routes:
            self._routes[key] = self._decide(segment)
        return self._routes[key]

    @traces.without_collector()
    def _decide(self, segment: Segment) -> Route:
        batch = _shapes_of_one(segment.data, segment.steps > 1)
        circumstances = Circumstances(
            steps=segment.steps,
            is_padded=segment.is_padded,
            may_pad=self._returns_rows,
            avoids_loops=self._avoids_loops,
            num_replicas=self._mesh.num_replicas,
        )
        is_shared = self._returns_rows or not segment.is_padded
        rows = None if is_shared else segment.rows
        record = self._tracer.trace(self.kind, batch, rows)
        if (
            is_shared
            and record.error is None
            and record.kind.sums_later
            and are_used_as_sums(record.jaxpr, *self.summands)
        ):
            self.kind = TraceKind()
            record = self._tracer.trace(self.kind, batch)
        found = self._analyze(record, batch) if is_shared else Analysis()
        route = decide(record, found, circumstances)
        if route.error is not None:
            raise route.error
        if record.traced is not None:
            parts = self._mesh.cores_per_replica
            parts *= 1 if is_shared else self._mesh.num_replicas
            analysis.warn_of_products(
                record.jaxpr, self._mesh.devices[0], parts
            )
        for equation in route.logs:
            analysis.warn_of_log(equation)
        return route

    def _analyze(self, record: Record, batch: Batch) -> Analysis:
        """Returns what the traces of the step show about its rows."""
        if record.error is not None or self._mesh.num_replicas == 1:
            return Analysis()
        if self._analyzed[0] is not record:
            analyze = analysis.analyze
            if self._returns_rows:
                analyze = analysis.analyze_outputs
            retrace = functools.partial(self._tracer.trace_again, record, batch)
            self._analyzed = record, analyze(record, retrace, self._step)
        return self._analyzed[1]

    def use_global_batch(
        self, route: Route, trace: Callable[[], object]
    ) -> None:
        """Lets all later batches run over the global batch.

        If the trace over the global batch fails as well, it raises the error of
        the user's code, with the shapes of the user's batch. The next batch is
        then tried on the replicas again.

        Args:
          route: The route, with its reason.
          trace: Traces the program over the global batch.
        """
        self._routes.clear()
        self.global_reason = route.reason
        try:
            trace()
            # Warns before the program donates the state, because filters may
            # turn the warning into an error.
            if route.reason != analysis.OUTPUT_REASON:
                analysis.warn_of_global_batch(route.reason or "")
        except BaseException:
            self.global_reason = None
            raise

    def find_record(self, data: Batch, is_stacked: bool) -> Record:
        """Returns the record from which a mapped program is made.

        Args:
          data: The batch, or several stacked ones.
          is_stacked: Whether the batches are stacked.

        Raises:
          Exception: if the step's code fails.
        """
        record = self._tracer.trace(self.kind, _shapes_of_one(data, is_stacked))
        if record.error is not None:
            raise record.error
        return record


def _shapes_of_one(data: Batch, is_stacked: bool) -> Batch:
    """Returns the shapes of a batch, or of one of several stacked batches."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape[int(is_stacked) :], a.dtype),
        data,
    )
