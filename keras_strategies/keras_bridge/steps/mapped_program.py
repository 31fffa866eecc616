"""A model's step as compiled programs: mapped over the replicas, or whole."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._core.batches import RowShape, Segment
from keras_strategies._core.divided_map import divided_map
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    replica_map,
    split_spec,
    whole_spec,
)
from keras_strategies._core.step_types import Batch
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.keras_bridge.steps import trace_checks

Body = Callable[[Any, Any, Any], Any]
"""A step as a pure function: two parts of a state, and data."""


class NotMapped(Exception):
    """Raised by a trace: the step is to run over the whole batch.

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
        reason = step.notes.whole_reason or trace_checks.reason_of(error)
        raise NotMapped(reason) from error


class MappedProgram:
    """The programs of one step: of a batch, of several, of a whole batch.

    A step whose mapped trace fails runs over the whole batch from then on,
    once that could be traced: the error of a user's code comes from there, in
    the shapes of the batch as the user made it, and says nothing of the next.

    Args:
      one: The jitted program of a batch that the replicas share.
      many: The same of several stacked batches.
      whole: The same over all rows, of one or several batches; it takes their
        `RowShape`, too.
      is_whole: Whether the step must see the whole batch at once.

    Attributes:
      is_whole: The same, or whether it turned out so.
    """

    def __init__(
        self, *, one: Any, many: Any, whole: Any, is_whole: bool
    ) -> None:
        self.is_whole = is_whole
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
        if is_shared and not self.is_whole:
            program = self._one if segment.steps == 1 else self._many
            try:
                return call(program, *args)
            except NotMapped as error:
                reason = error.reason
            self._whole.trace(*args, segment.shape)
            # Before the step takes its state, should warnings be errors.
            if reason is not None:
                trace_checks.warn_of_whole(reason)
            self.is_whole = True
        return self.start_whole(call, args, segment)

    def start_whole(
        self,
        call: Callable[..., Any],
        args: tuple[Any, Any, Any],
        segment: Segment,
    ) -> Any:
        """As `start`, with the program over all rows."""
        return call(self._whole, *args, segment.shape)


def over_replicas(
    body: Body, mesh: ReplicaMesh, *, stacked: bool, splits_results: bool
) -> Body:
    """A step mapped over the replicas; each holds all of the state.

    Args:
      body: A replica's step.
      mesh: The replicas.
      stacked: Whether the data has several batches, one after the other.
      splits_results: Whether the first result has the replica's rows, like
        the data; otherwise, and the second, it is the same on all replicas.
    """
    split, whole = split_spec(mesh, dim=int(stacked)), whole_spec()
    return replica_map(
        body,
        mesh,
        in_specs=(whole, whole, split),
        out_specs=(split, whole) if splits_results else whole,
    )


def over_dividing_replicas(
    body: Body,
    mesh: ReplicaMesh,
    state: tuple[Any, Any],
    results: Callable[[Any], Any],
) -> Body:
    """A step mapped over replicas that divide variables among them.

    Args:
      body: A replica's step, of one batch.
      mesh: The replicas.
      state: Specs of the two parts of the state.
      results: Makes the results' specs, of the results.
    """
    return divided_map(
        body, mesh, in_specs=(*state, split_spec(mesh)), out_specs=results
    )


def over_whole_batch(
    body: Body, scanned: Callable[[Body], Body], mesh: ReplicaMesh
) -> Callable[[Any, Any, Any, RowShape], Any]:
    """A step that sees all rows of a padded batch, or of several."""

    def step(first: Any, second: Any, data: Batch, shape: RowShape) -> Any:
        fn = scanned(body) if shape.steps > 1 else body
        return trace_checks.whole_batch(fn, (first, second), data, shape, mesh)

    return step


def jitted(fn: Callable[..., Any], name: str, **options: Any) -> Any:
    """`jax.jit` under a name that profiles and dumps show."""

    def program(*args: Any) -> Any:
        return fn(*args)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)
