"""The context of a replica-mapped step while it is traced.

A step is traced in one thread, so the context is thread-local: the hooks that
are installed while a step is traced do nothing in other threads.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from jax.extend.core import get_opaque_trace_state

from keras_strategies._core.buffers import Buffering, buffering_of
from keras_strategies._core.mesh import ReplicaMesh


class WholeBatchNeeded(Exception):
    """Raised by a trace that must see the whole batch at once."""


@dataclasses.dataclass(kw_only=True)
class StepContext:
    """The trace of one replica-mapped step; made by the step, read by hooks.

    Attributes:
      mesh: The replicas.
      rows: Rows of the batch that this replica holds.
      is_whole: Code that is running now already sees the whole batch.
      scaled_losses: Ids of the optimizers that scaled the loss, by 1/replicas
        too, so that their gradients are to be summed and not averaged.
      in_optimizer: An optimizer is being applied; inner ones see gradients
        that were reduced already.
      equal: Values (by id) that are equal on all replicas: what an optimizer
        returned for reduced gradients.
      metric_rules: How the variables of a metric (by id) are merged, where
        that is not by summing what the replicas added.
      before: The values (by id) of the metrics' variables that this replica
        started from: those before the step, or after a reset in it.
      results: What metrics returned (by id of the value), for the whole
        batch.
      in_metric: A metric is being updated or read; nested ones are its parts.
      in_scaling: A loss is being scaled.
      seeds: Ids of the seeds whose stream is this replica's own.
      in_assign: A variable is being written with a value of all replicas.
      unaggregated: Ids of a user's variables that were written without a rule
        for replicas that differ.
      is_local: The step is a user's own function: losses are a replica's,
        gradients are summed by the optimizer.
      in_update: The function writes the same to all copies of a variable.
      in_compiled: Losses and metrics that were given to `compile` are being
        called: with rows.
      is_uneven: Replicas may do something else than others, since their
        numbers of rows differ.
      rows_of_all: Of uneven arguments, by this replica's number of rows, those
        of all replicas; several where arguments differ.
      share: This replica's weight in averages of states, where some have no
        rows and so no say; None where all weigh the same.
      loss_tracker: The metric that Keras's own step gives the loss and the
        number of rows.
      is_probe: The trace is made with twice the rows, to look at sizes alone.
      sizes: What was taken for a number of rows, or not, in the order of the
        trace: the size, whether it was, and what it was given to.
      losses: What Keras's own step gave the loss tracker, in the trace that
        `note_losses` began in.
      whole_reason: Why the step cannot be mapped over the replicas, if it
        cannot; set by `demand_whole`.
    """

    mesh: ReplicaMesh
    rows: int
    is_whole: bool = False
    scaled_losses: set[int] = dataclasses.field(default_factory=set)
    in_optimizer: bool = False
    equal: dict[int, Any] = dataclasses.field(default_factory=dict)
    metric_rules: dict[int, str] = dataclasses.field(default_factory=dict)
    before: dict[int, Any] = dataclasses.field(default_factory=dict)
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    in_metric: bool = False
    in_scaling: bool = False
    seeds: set[int] = dataclasses.field(default_factory=set)
    in_assign: bool = False
    unaggregated: set[int] = dataclasses.field(default_factory=set)
    is_local: bool = False
    in_update: bool = False
    in_compiled: bool = False
    is_uneven: bool = False
    rows_of_all: dict[int, set[tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    share: Any = None
    loss_tracker: Any = None
    is_probe: bool = False
    sizes: list[tuple[float, bool, str]] = dataclasses.field(
        default_factory=list
    )
    losses: list[Any] = dataclasses.field(default_factory=list)
    whole_reason: str | None = None
    _trace_state: Any = None

    @property
    def axis(self) -> str:
        """The replica axis."""
        return self.mesh.axis

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.mesh.num_replicas

    @property
    def is_empty(self) -> bool:
        """Whether this replica has no rows.

        What is no number of its gradients is then the mean of nothing, and
        counts nothing.
        """
        return self.rows_of_all.keys() == {0}

    @property
    def buffering(self) -> Buffering | None:
        """Which arrays share a buffer when they are reduced."""
        return buffering_of(self.mesh)

    def note_losses(self) -> None:
        """Notes the losses of the trace that begins, from here."""
        self.losses = []
        self._trace_state = get_opaque_trace_state()

    def note_loss(self, value: Any) -> None:
        """Notes a loss, unless it is one of an inner trace."""
        if get_opaque_trace_state() == self._trace_state:
            self.losses.append(value)

    def took_for_rows(self, size: float, is_rows: bool, of: str) -> None:
        """Notes a size that a probe is to confirm (trace_checks.py).

        Args:
          size: A dimension, or a number.
          is_rows: Whether it was taken for a number of rows.
          of: What it was given to, for messages.
        """
        if not (self.in_compiled or self.in_metric or self.is_local):
            self.sizes.append((size, is_rows, of))

    def demand_whole(self, reason: str) -> NoReturn:
        """Gives the trace up: the step is to run over the whole batch.

        Args:
          reason: A sentence for the warning: what the step does, and what
            would let it be mapped.
        """
        if self.is_local:
            raise ValueError(
                "What the replicas do in `run` cannot be combined. Received: "
                f"{reason}."
            )
        self.whole_reason = reason
        raise WholeBatchNeeded(reason)

    @contextlib.contextmanager
    def flag(self, name: str) -> Iterator[None]:
        """Sets one of the boolean attributes while the block runs."""
        before = getattr(self, name)
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, before)


class _Current(threading.local):
    step: StepContext | None = None


_current = _Current()


def current_step() -> StepContext | None:
    """The step that this thread is tracing for one of several replicas."""
    return _current.step


@contextlib.contextmanager
def step_scope(step: StepContext | None) -> Iterator[None]:
    """Makes `step` this thread's step while the block runs."""
    before = _current.step
    _current.step = step
    try:
        yield
    finally:
        _current.step = before
