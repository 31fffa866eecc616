"""A model's step as compiled programs: mapped over the replicas, or whole."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._core.batches import RowShape, Segment
from keras_strategies._core.jaxprs.replay import own_trace
from keras_strategies._core.jaxprs.specs import Sharded
from keras_strategies._core.jaxprs.traces import is_traced
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import replicated_spec, split_spec
from keras_strategies._core.sharded_map import sharded_map
from keras_strategies.keras_bridge.models.attention import attention_for
from keras_strategies.keras_bridge.step_context import (
    Batch,
    GlobalBatchNeeded,
    ReplicaNeeded,
    ReplicaScope,
    StepContext,
    StepFacts,
    num_replica_uses,
)
from keras_strategies.keras_bridge.steps import trace_checks
from keras_strategies.keras_bridge.steps.uneven_step import UnevenRows

Body = Callable[[Any, Any, Any], Any]
"""A step as a pure function: two parts of a state, and data."""


class NotMapped(Exception):
    """Raised by a trace: the step is to run over the global batch.

    Args:
      reason: Why, for a warning; None if there is nothing to say.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def mapped_trace(
    step: StepContext, model_step: Callable[..., Any]
) -> Iterator[None]:
    """Turns errors of a replica's trace into `NotMapped`.

    Args:
      step: The trace.
      model_step: The model's step that is traced.
    """
    try:
        yield
    except Exception as error:
        trace_checks.forget_losses(model_step)
        if isinstance(error, NotMapped):
            raise
        reason = step.notes.global_batch_reason or trace_checks.reason_of(error)
        raise NotMapped(reason) from error


class MappedProgram:
    """The programs of one step: of a batch, of several, of the global batch.

    A step whose mapped trace fails runs over the global batch from then on,
    once that could be traced: the error of a user's code comes from there, in
    the shapes of the batch as the user made it, and says nothing of the next.

    Args:
      one: The jitted program of a batch that the replicas share.
      many: The same of several stacked batches.
      whole: The same over all rows, of one or several batches; it takes their
        `RowShape`, too.
      uneven: As `whole`, with each replica's rows for itself.
      is_global: Whether the step must see the global batch.

    Attributes:
      is_global: The same, or whether it turned out so.
      is_uneven: Whether indivisible batches run with each replica's rows.
    """

    def __init__(
        self, *, one: Any, many: Any, whole: Any, uneven: Any, is_global: bool
    ) -> None:
        self.is_global = is_global
        self.is_uneven = False
        self._uneven = uneven
        self._reason = "the model's state is that of the global batch"
        self._one = one
        self._many = many
        self._whole = whole

    def start(
        self,
        call: Callable[..., Any],
        args: tuple[Any, Any, Any],
        segment: Segment,
        *,
        is_shared: bool = True,
    ) -> Any:
        """Calls `call(program, *args)` with the program of a segment.

        Args:
          call: Runs a jitted function, or lowers it.
          args: Two parts of the state, and the segment's data.
          segment: What the data is.
          is_shared: Whether the replicas can share its rows.
        """
        if is_shared and not self.is_global:
            program = self._one if segment.steps == 1 else self._many
            try:
                return call(program, *args)
            except NotMapped as error:
                reason, cause = error.reason, error.__cause__
            self._reason = reason or (
                "it does not return as many rows as the batch has"
            )
            with needing_no_replica(self._reason, cause):
                self._whole.trace(*args, segment.shape)
            # Before the step takes its state, should warnings be errors.
            if reason is not None:
                trace_checks.warn_of_global_batch(reason)
            self.is_global = True
        return self.start_global(call, args, segment)

    def start_global(
        self,
        call: Callable[..., Any],
        args: tuple[Any, Any, Any],
        segment: Segment,
    ) -> Any:
        """As `start`, with the program over all rows.

        Raises:
          RuntimeError: the step must see the global batch, and asks for what
            one replica alone has.
        """
        if self.is_global:
            with needing_no_replica(self._reason):
                return call(self._whole, *args, segment.shape)
        if not self.is_uneven:
            try:
                return call(self._whole, *args, segment.shape)
            except ReplicaNeeded:
                self.is_uneven = True
        return call(self._uneven, *args, segment.shape)


@contextlib.contextmanager
def needing_no_replica(
    reason: str, fault: BaseException | None = None
) -> Iterator[None]:
    """Refuses what one replica alone has, in a trace over the global batch.

    Args:
      reason: Why the step must see the global batch.
      fault: What ended the step's trace with a replica's rows, if that is why.

    Raises:
      RuntimeError: the step asks its replica context for such a thing. Where
        the step's own code failed, that error is raised instead.
    """
    try:
        yield
    except ReplicaNeeded as needed:
        if fault is not None and not isinstance(fault, GlobalBatchNeeded):
            fault.add_note(
                "The step was traced with one replica's share of the batch's "
                f"rows, since it asks its replica context for `{needed.name}`."
            )
            raise fault from None
        raise RuntimeError(
            "A step that runs over the global batch has no replica "
            f"context. Received: `{needed.name}` of one, in a step that "
            f"must run over the global batch: {reason}. Remove one of the two."
        ) from None


def over_global_batch(
    body: Body, scanned: Callable[[Body], Body], mesh: ReplicaMesh
) -> Callable[[Any, Any, Any, RowShape], Any]:
    """A step that sees all rows of a padded batch, or of several."""

    def step(first: Any, second: Any, data: Batch, shape: RowShape) -> Any:
        fn = scanned(body) if shape.steps > 1 else body
        return trace_checks.call_on_global_batch(
            fn, (first, second), data, shape, mesh
        )

    return step


def mapper(
    mesh: ReplicaMesh,
    specs: tuple[Any, Any],
    results: Callable[[Any], Any],
    scanned: Callable[[Body], Body],
    *,
    splits_results: bool,
) -> Callable[[Body, bool], Body]:
    """Returns what maps a step over the replicas: `mapped(step, stacked)`.

    Args:
      mesh: The replicas.
      specs: Of the two parts of the state.
      results: Makes the results' specs, where variables are sharded.
      scanned: Makes a step of several batches of one of one.
      splits_results: Whether the first result has the replica's rows, like
        the data; others are the same on all replicas.
    """
    is_sharded = any(isinstance(s, Sharded) for s in jax.tree.leaves(specs))
    whole = replicated_spec()

    def mapped(step: Body, stacked: bool) -> Body:
        # Of a step of several batches, which are mapped as one.
        is_inner = stacked and not is_sharded
        split = split_spec(mesh, dim=int(is_inner))
        of_results = (split, whole, whole) if splits_results else whole
        body = sharded_map(
            scanned(step) if is_inner else step,
            mesh,
            in_specs=(*specs, split) if is_sharded else (whole, whole, split),
            out_specs=results if is_sharded else of_results,
        )
        return scanned(body) if stacked and is_sharded else body

    return mapped


def over_uneven_replicas(
    mapped: Callable[[Body, bool], Body],
    step: Callable[..., Any],
    mesh: ReplicaMesh,
    *,
    returns_rows: bool,
) -> Callable[[Any, Any, Any, RowShape], Any]:
    """A step of which each replica runs its own rows of a padded batch.

    Args:
      mapped: Maps a step over the replicas, of one batch or of several.
      step: A replica's step; takes each replica's number of rows first.
      mesh: The replicas.
      returns_rows: Whether the first result has rows, like the data.
    """

    def program(first: Any, second: Any, data: Batch, shape: RowShape) -> Any:
        axis = int(shape.steps > 1)
        padded = jax.tree.leaves(data)[0].shape[axis]
        rows = UnevenRows.of(shape, padded, mesh.num_replicas)
        of_counts = functools.partial(step, rows.counts)
        body = mapped(of_counts, shape.steps > 1)
        results = body(first, second, rows.take(data, axis, mesh))
        if not returns_rows:
            return results
        outputs, *others = results
        return rows.put_back(outputs, axis, mesh), *others

    return program


@contextlib.contextmanager
def global_batch_trace(
    mesh: ReplicaMesh,
    replica_scope: ReplicaScope | None,
    model_step: Callable[..., Any],
    step: StepContext | None = None,
) -> Iterator[None]:
    """What is in place while a step is traced over the global batch.

    Args:
      mesh: The replicas.
      replica_scope: Makes a step's replica context current.
      model_step: The model's step that is traced.
      step: The trace of the one replica, where that is mapped.
    """
    if mesh.num_replicas > 1:
        facts = StepFacts(mesh=mesh, rows=1, is_global_batch=True)
        step = StepContext(facts=facts)
    try:
        with attention_for(mesh), in_replica(replica_scope, step):
            yield
    except BaseException:
        trace_checks.forget_losses(model_step)
        raise


@contextlib.contextmanager
def in_replica(
    replica_scope: ReplicaScope | None, step: StepContext | None
) -> Iterator[None]:
    """Makes a step's replica context current for a block."""
    if replica_scope is None:
        yield
        return
    is_global = step is None or step.facts.is_global_batch
    kind = "whole" if is_global else "step"
    with contextlib.ExitStack() as stack:
        if is_traced():
            # What has asked its replica context is traced again, and asks.
            name = f"ks.{kind}.{num_replica_uses()}"
            stack.enter_context(own_trace(name))
        stack.enter_context(replica_scope(step))
        yield


def jitted(fn: Callable[..., Any], name: str, **options: Any) -> Any:
    """`jax.jit` under a name that profiles and dumps show."""

    def program(*args: Any) -> Any:
        return fn(*args)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)
