"""A step's compiled programs, for each replica or for the global batch."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._types import Tree
from keras_strategies.keras_bridge.step_context import (
    GlobalBatchNeeded,
    ReplicaNeeded,
    ReplicaScope,
    StepContext,
    StepFacts,
    count_replica_uses,
)
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.kernels.scanned_blocks import (
    scanning_blocks,
)
from keras_strategies.passes import traces
from keras_strategies.passes.replay import separate_trace
from keras_strategies.passes.traces import is_tracing, without_collector
from keras_strategies.spmd.batches import Segment
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step import trace_checks

Body = Callable[[Any, Any, Any], Any]
"""A step as a pure function of written state, read state, and data."""

Arguments = Callable[[bool], tuple[Any, Any, Any]]
"""A function that returns the arguments of a step's program."""


class NotMapped(Exception):
    """Raised by a trace whose step must run over the global batch.

    Args:
      reason: The reason, as text for a warning; None to give no warning.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def mapped_trace(
    step: StepContext, model_step: Callable[..., Any]
) -> Iterator[None]:
    """Turns errors while tracing one replica's step into `NotMapped`.

    Errors that are faults of this package are raised as they are.

    Args:
      step: The context of the trace.
      model_step: The model's step that is traced.
    """
    try:
        yield
    except Exception as error:
        trace_checks.forget_losses(model_step)
        is_fault = traces.is_fault_of_package(error)
        if is_fault or isinstance(error, NotMapped | trace_checks.LogWarning):
            raise
        reason = step.notes.global_batch_reason or trace_checks.describe_error(
            error
        )
        raise NotMapped(reason) from error


@dataclasses.dataclass(kw_only=True, eq=False)
class MappedProgram:
    """The programs of one step, and the choice between them.

    If the mapped trace of a step fails, the step is traced over the global
    batch. If this second trace succeeds, the step runs over the global batch
    from then on. Otherwise the second trace raises the error of the user's
    code, with the shapes of the user's batch; the next batch is tried on the
    replicas again.

    Attributes:
      one: The jitted program for a batch that the replicas share evenly.
      many: The jitted program for several stacked batches that the replicas
        share evenly.
      whole: The jitted program over all rows of one or several batches; it also
        receives their `RowShape`.
      uneven: Like `whole`, but each replica runs on its own rows.
      is_global: Whether the step must see the global batch; set in advance, or
        after a trace has shown it.
      is_uneven: Whether indivisible batches run with `uneven` instead of
        `whole`.
      reason: The reason why the step must see the global batch.
    """

    one: jax.stages.Wrapped
    many: jax.stages.Wrapped
    whole: jax.stages.Wrapped
    uneven: jax.stages.Wrapped
    is_global: bool
    is_uneven: bool = False
    reason: str = "a layer of the model stores a state for each row"

    def start(
        self,
        call: Callable[..., Any],
        args: Arguments,
        segment: Segment,
        *,
        is_shared: bool = True,
    ) -> Any:
        """Calls `call(program, *args)` with the program that fits a segment.

        Args:
          call: A function that runs a jitted function, or lowers it.
          args: A function that returns the arguments: the written state, the
            read state, and the segment's data. It receives whether the step is
            mapped over replicas with the same number of rows.
          segment: The batches to run.
          is_shared: Whether the replicas can share the segment's rows evenly.

        Returns:
          What `call` returns.
        """
        if is_shared and not self.is_global:
            program = self.one if segment.steps == 1 else self.many
            try:
                return call(program, *args(True))
            except NotMapped as error:
                reason, cause = error.reason, error.__cause__
            self.reason = reason or (
                "its outputs do not have the number of rows of the batch"
            )
            with needing_no_replica(self.reason, cause):
                self.whole.trace(*args(False), segment.shape)
            # Warns before the program donates the state, because filters may
            # turn the warning into an error.
            if reason is not None:
                trace_checks.warn_of_global_batch(reason)
            self.is_global = True
        return self.start_global(call, args, segment)

    def start_global(
        self,
        call: Callable[..., Any],
        args: Arguments,
        segment: Segment,
    ) -> Any:
        """Calls `call(program, *args)` with a program for any number of rows.

        Returns:
          What `call` returns.

        Raises:
          RuntimeError: if the step must see the global batch, but uses the
            context of a single replica.
        """
        arrays = args(False)
        if self.is_global:
            with needing_no_replica(self.reason):
                return call(self.whole, *arrays, segment.shape)
        if not self.is_uneven:
            try:
                return call(self.whole, *arrays, segment.shape)
            except ReplicaNeeded:
                self.is_uneven = True
        return call(self.uneven, *arrays, segment.shape)


@contextlib.contextmanager
def needing_no_replica(
    reason: str, fault: BaseException | None = None
) -> Iterator[None]:
    """Raises if a trace over the global batch uses a replica's context.

    Args:
      reason: The reason why the step must see the global batch.
      fault: The error of the trace with one replica's rows, if this error is
        the reason.

    Raises:
      RuntimeError: if the step uses the context of a single replica. If the
        step's code failed in the trace with one replica's rows, that error is
        raised instead.
    """
    try:
        yield
    except ReplicaNeeded as needed:
        if fault is not None and not isinstance(fault, GlobalBatchNeeded):
            fault.add_note(
                "The step was traced with the rows of one replica, because it "
                f"uses `{needed.name}` of its replica context."
            )
            raise fault from None
        raise RuntimeError(
            "A step that runs over the global batch must not use a replica "
            f"context. Received: a use of `{needed.name}` of a replica "
            "context, in a step that must run over the global batch for this "
            f"reason: {reason}. Remove that use, or change the step so that "
            "the reason no longer applies."
        ) from None


@contextlib.contextmanager
def global_batch_trace(
    mesh: ReplicaMesh,
    replica_scope: ReplicaScope | None,
    model_step: Callable[..., Any],
    step: StepContext | None = None,
) -> Iterator[None]:
    """Sets up the tracing of a step over the global batch, for a block.

    Args:
      mesh: The mesh of the replicas.
      replica_scope: Makes a step's replica context current for a block.
      model_step: The model's step that is traced.
      step: The context of the trace, if the strategy has only one replica.
    """
    if mesh.num_replicas > 1:
        facts = StepFacts(mesh=mesh, rows=1, is_global_batch=True)
        step = StepContext(facts=facts)
    try:
        with (
            kernels_for(mesh, is_global=True),
            scanning_blocks(),
            in_replica(replica_scope, step),
        ):
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
        if is_tracing():
            # JAX must not reuse traces of inner functions from another replica
            # context; functions that used their context are traced again.
            name = f"ks.{kind}.{count_replica_uses()}"
            stack.enter_context(separate_trace(name))
        stack.enter_context(replica_scope(step))
        yield


def jit_named(
    fn: Callable[..., Any], name: str, **options: Any
) -> jax.stages.Wrapped:
    """Compiles a function under a name that profiles and dumps show."""

    def program(*args: Tree) -> Tree:
        with without_collector():
            return fn(*args)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)
