"""A model's step as compiled programs: mapped over the replicas, or whole."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._core.batches import Segment
from keras_strategies._core.jaxprs.replay import own_trace
from keras_strategies._core.jaxprs.traces import is_traced
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Tree
from keras_strategies.keras_bridge.step_context import (
    GlobalBatchNeeded,
    ReplicaNeeded,
    ReplicaScope,
    StepContext,
    StepFacts,
    num_replica_uses,
)
from keras_strategies.keras_bridge.steps import trace_checks
from keras_strategies.keras_bridge.steps.attention import attention_for

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


@dataclasses.dataclass(kw_only=True, eq=False)
class MappedProgram:
    """The programs of one step: of a batch, of several, of the global batch.

    A step whose mapped trace fails runs over the global batch from then on,
    once that could be traced: the error of a user's code comes from there, in
    the shapes of the batch as the user made it, and says nothing of the next.

    Attributes:
      one: The jitted program of a batch that the replicas share.
      many: The same of several stacked batches.
      whole: The same over all rows, of one or several batches; it takes their
        `RowShape`, too.
      uneven: As `whole`, with each replica's rows for itself.
      is_global: Whether the step must see the global batch, or it turned out
        so.
      is_uneven: Whether indivisible batches run with each replica's rows.
      reason: Why the step must see the global batch.
    """

    one: jax.stages.Wrapped
    many: jax.stages.Wrapped
    whole: jax.stages.Wrapped
    uneven: jax.stages.Wrapped
    is_global: bool
    is_uneven: bool = False
    reason: str = "the model's state is that of the global batch"

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

        Returns:
          What `call` returns.
        """
        if is_shared and not self.is_global:
            program = self.one if segment.steps == 1 else self.many
            try:
                return call(program, *args)
            except NotMapped as error:
                reason, cause = error.reason, error.__cause__
            self.reason = reason or (
                "it does not return as many rows as the batch has"
            )
            with needing_no_replica(self.reason, cause):
                self.whole.trace(*args, segment.shape)
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

        Returns:
          What `call` returns.

        Raises:
          RuntimeError: the step must see the global batch, and asks for what
            one replica alone has.
        """
        if self.is_global:
            with needing_no_replica(self.reason):
                return call(self.whole, *args, segment.shape)
        if not self.is_uneven:
            try:
                return call(self.whole, *args, segment.shape)
            except ReplicaNeeded:
                self.is_uneven = True
        return call(self.uneven, *args, segment.shape)


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


def jitted(
    fn: Callable[..., Any], name: str, **options: Any
) -> jax.stages.Wrapped:
    """`jax.jit` under a name that profiles and dumps show."""

    def program(*args: Tree) -> Tree:
        return fn(*args)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)
