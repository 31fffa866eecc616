"""The context of a replica-mapped step while it is traced.

A step is traced in one thread, so the context is thread-local: the hooks that
are installed while a step is traced do nothing in other threads.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from keras_strategies._core import current_step as _current
from keras_strategies._core.attributes import attribute_set
from keras_strategies._core.buffers import Buffering, buffering_of
from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._core.jaxprs import replay
from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.mesh import ReplicaMesh

Group = list[Any]
"""The values of some variables, in the order of the variables: each of its
variable's shape; in a mapped program those of one replica."""


class GlobalBatchNeeded(Exception):
    """Raised by a trace that must see the global batch."""


class ReplicaNeeded(BaseException):
    """Ends a trace over the global batch that asks for a replica's own.

    No `Exception`: user code and Keras's layers let it pass.

    Attributes:
      name: What the trace asked its replica context for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known of a step before it is traced.

    Attributes:
      mesh: The replicas.
      rows: Rows of the batch that this replica holds.
      is_local: The step is a user's own function: losses are a replica's,
        gradients are summed by the optimizer.
      is_probe: The trace is made with twice the rows, to look at sizes alone.
      is_uneven: Replicas may do something else than others, since their
        numbers of rows differ.
      rows_of_all: Of uneven arguments, by this replica's number of rows, those
        of all replicas; several where arguments differ.
      rows_of_replicas: The rows of each replica, where these run a model's
        step on different numbers of rows.
      is_global_batch: The trace is not a replica's: it sees the global batch.
      share: This replica's weight in averages of states, where some have no
        rows and so no say; a number or a traced scalar. None where all weigh
        the same.
      loss_tracker: The metric that Keras's own step gives the loss and the
        number of rows.
    """

    mesh: ReplicaMesh
    rows: int
    is_local: bool = False
    is_probe: bool = False
    is_uneven: bool = False
    rows_of_all: Mapping[int, set[tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    rows_of_replicas: tuple[int, ...] | None = None
    is_global_batch: bool = False
    share: Any = None
    loss_tracker: Any = None


@dataclasses.dataclass(kw_only=True)
class StepFlags:
    """What code is running now; set by `StepContext.flag` alone.

    Attributes:
      sees_global_batch: It already sees the global batch.
      in_optimizer: An optimizer is being applied; inner ones see gradients
        that were reduced already.
      in_metric: A metric is being updated or read; nested ones are its parts.
      in_scaling: A loss is being scaled.
      in_assign: A variable is being written with a value of all replicas.
      in_update: The function writes the same to all copies of a variable.
      in_loss: A model's loss is being computed; nested ones are its parts.
      in_compiled: Losses and metrics that were given to `compile` are being
        called: with rows.
    """

    sees_global_batch: bool = False
    in_optimizer: bool = False
    in_metric: bool = False
    in_scaling: bool = False
    in_assign: bool = False
    in_update: bool = False
    in_loss: bool = False
    in_compiled: bool = False


@dataclasses.dataclass(kw_only=True)
class StepNotes:
    """What the hooks note for each other and for the merge of the state.

    Attributes:
      own_seeds: The seeds whose stream is this replica's own.
      scaled_losses: The optimizers that scaled the loss, by 1/replicas too, so
        that their gradients are to be summed and not averaged.
      equal: Values that are equal on all replicas: what an optimizer returned
        for reduced gradients.
      metric_rules: How a metric's variable is merged, where that is not by
        summing what the replicas added.
      before: The value of a metric's variable that this replica started from:
        the one before the step, or after a reset in it.
      results: Of values that metrics returned for the global batch, the
        `metric_hooks.Result`.
      unaggregated: A user's variables that were written without a rule for
        replicas that differ.
      sizes: What was taken for a number of rows, or not, in the order of the
        trace: the size, whether it was, and what it was given to.
      replica_uses: What the step has asked its replica context for.
      global_batch_reason: Why the step cannot be mapped over the replicas,
        if it cannot; set by `demand_global_batch`.
    """

    own_seeds: IdentitySet = dataclasses.field(default_factory=IdentitySet)
    scaled_losses: IdentitySet = dataclasses.field(default_factory=IdentitySet)
    equal: IdentitySet = dataclasses.field(default_factory=IdentitySet)
    metric_rules: IdentityMap[str] = dataclasses.field(
        default_factory=IdentityMap
    )
    before: IdentityMap[Any] = dataclasses.field(default_factory=IdentityMap)
    results: IdentityMap[Any] = dataclasses.field(default_factory=IdentityMap)
    unaggregated: IdentitySet = dataclasses.field(default_factory=IdentitySet)
    sizes: list[tuple[float, bool, str]] = dataclasses.field(
        default_factory=list
    )
    replica_uses: list[str] = dataclasses.field(default_factory=list)
    global_batch_reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext:
    """The trace of one replica-mapped step; made by the step, read by hooks.

    Attributes:
      facts: What is known before the trace.
      flags: What code is running now.
      notes: What the hooks found.
    """

    facts: StepFacts
    flags: StepFlags = dataclasses.field(default_factory=StepFlags)
    notes: StepNotes = dataclasses.field(default_factory=StepNotes)

    @property
    def axis(self) -> Axis:
        """The replicas' axis, or axes, for collectives."""
        return self.facts.mesh.all_replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.facts.mesh.num_replicas

    @property
    def num_sharing(self) -> int:
        """Number of replicas that have rows: a mean of losses is over these."""
        of_replicas = self.facts.rows_of_replicas or ()
        return sum(rows > 0 for rows in of_replicas) or self.num_replicas

    @property
    def weight(self) -> float:
        """The weight of this replica's mean over rows, of all; 1 if shared."""
        of_replicas = self.facts.rows_of_replicas
        if of_replicas is None:
            return 1.0
        return self.facts.rows * self.num_sharing / sum(of_replicas)

    @property
    def is_empty(self) -> bool:
        """Whether this replica has no rows; NaN in its gradients is ignored."""
        return set(self.facts.rows_of_all) == {0}

    @property
    def sees_own_rows(self) -> bool:
        """Whether code sees this replica's rows, and in no metric."""
        return not (self.flags.sees_global_batch or self.flags.in_metric)

    @property
    def buffering(self) -> Buffering | None:
        """Which arrays share a buffer when they are reduced."""
        return buffering_of(self.facts.mesh)

    def with_facts(self, **facts: object) -> "StepContext":
        """The same trace, with flags and notes shared, and other facts."""
        return dataclasses.replace(
            self, facts=dataclasses.replace(self.facts, **facts)
        )

    def probe(self, rows: int) -> "StepContext":
        """A new trace of the same step with another number of rows."""
        facts = StepFacts(mesh=self.facts.mesh, rows=rows, is_probe=True)
        return StepContext(facts=facts)

    def took_for_rows(self, size: float, is_rows: bool, of: str) -> None:
        """Notes a size that a probe is to confirm (trace_checks.py).

        Args:
          size: A dimension, or a number.
          is_rows: Whether it was taken for a number of rows.
          of: What it was given to, for messages.
        """
        is_known = self.flags.in_compiled or self.flags.in_metric
        if not (is_known or self.facts.is_local):
            self.notes.sizes.append((size, is_rows, of))

    def demand_global_batch(self, reason: str) -> NoReturn:
        """Gives the trace up: the step is to run over the global batch.

        Args:
          reason: A sentence for the warning: what the step does, and what
            would let it be mapped.
        """
        if self.facts.is_local:
            raise ValueError(
                "What the replicas do in `run` cannot be combined. Received: "
                f"{reason}."
            )
        self.notes.global_batch_reason = reason
        raise GlobalBatchNeeded(reason)

    def note_replica_use(self, name: str) -> None:
        """Notes that the step asked for what one replica alone has.

        Raises:
          ReplicaNeeded: the trace sees the global batch.
        """
        _Uses.count += 1
        if self.facts.is_global_batch:
            raise ReplicaNeeded(name)
        self.notes.replica_uses.append(name)

    def flag(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Sets one of the flags while the block runs."""
        return attribute_set(self.flags, name, True)


class _Uses:
    count = 0


def num_replica_uses() -> int:
    """How often steps of this process have asked their replica context.

    What it is after a trace tells that from the next ones (`own_trace`).
    """
    return _Uses.count


ReplicaScope = Callable[
    [StepContext | None], contextlib.AbstractContextManager[Any]
]
"""Makes a step's replica context current for a block; None: that of one
replica, which is alone."""

current_step: Callable[[], StepContext | None] = _current.current_step
"""The step that this thread is tracing for one of several replicas."""

step_scope = _current.step_scope
"""Makes a step this thread's step while a block runs."""


@contextlib.contextmanager
def building(mesh: ReplicaMesh, replica_scope: ReplicaScope) -> Iterator[None]:
    """Lets a model be built with the shapes that a replica's step has.

    Args:
      mesh: The replicas.
      replica_scope: Makes a step's replica context current.
    """
    step = StepContext(facts=StepFacts(mesh=mesh, rows=1))
    alone = replay.Alone(mesh.num_replicas)
    with replay.replay_scope(alone), replica_scope(step):
        yield
