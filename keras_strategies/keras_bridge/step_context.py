"""The context of a replica-mapped step while it is traced.

A step is traced in one thread, so the context is thread-local: the hooks that
are installed while a step is traced do nothing in other threads.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from keras_strategies._core import current_step as _current
from keras_strategies._core.attributes import temporary_attribute
from keras_strategies._core.buffers import Buffering, choose_buffering
from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._core.jaxprs import replay
from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.mesh import ReplicaMesh

Group = list[Any]
"""The values of some variables, in the variables' order, each of its
variable's shape; in a mapped program the values of one replica."""


class GlobalBatchNeeded(Exception):
    """Raised by a trace that needs the global batch."""


class ReplicaNeeded(BaseException):
    """Raised by a trace over the global batch that needs a single replica.

    Not an `Exception`, so that user code and Keras's layers do not catch it.

    Attributes:
      name: The member of the replica context that the trace used.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts about a step that are known before it is traced.

    Attributes:
      mesh: The mesh of the replicas.
      rows: Number of rows of the batch that this replica holds.
      is_local: Whether the step is a function given to `run`: losses are
        per-replica, and the optimizer sums the gradients.
      is_probe: Whether the trace has twice the rows, only to compare sizes.
      is_uneven: Whether replicas may run different code, because their
        numbers of rows differ.
      rows_of_all: For uneven arguments, maps this replica's number of rows to
        those of all replicas; several if arguments differ.
      rows_of_replicas: Number of rows of each replica, if the replicas run a
        model's step on different numbers of rows.
      is_global_batch: Whether the trace sees the global batch, and not one
        replica's rows.
      share: This replica's weight in averages of states, a number or a traced
        scalar; 0 without rows. None if all replicas weigh the same.
      loss_tracker: The metric that Keras's step updates with the loss and the
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
    """The kind of code that is running; set only by `StepContext.flag`.

    Attributes:
      sees_global_batch: Whether the code already sees the global batch.
      in_optimizer: Whether an optimizer is being applied; nested ones see
        gradients that are already reduced.
      in_metric: Whether a metric is being updated or read; nested ones are
        its parts.
      in_scaling: Whether a loss is being scaled.
      in_assign: Whether a variable is being written with a value that the
        replicas already combined.
      in_update: Whether the function writes the same to all copies of a
        variable.
      in_loss: Whether a model's loss is being computed; nested ones are its
        parts.
      in_compiled: Whether losses or metrics that were given to `compile` are
        being called; their arguments have rows.
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
    """Notes of the hooks for each other and for the merge of the state.

    Attributes:
      replica_seeds: Seeds whose streams are per-replica.
      scaled_losses: Optimizers that scaled the loss, also by 1/replicas, so
        that their gradients must be summed and not averaged.
      equal: Values that are equal on all replicas, such as those that an
        optimizer computed from reduced gradients.
      metric_rules: The rule that merges a metric's variable; by default the
        replicas' changes are summed.
      before: The value of a metric's variable that this replica started from:
        the one before the step, or after a reset in it.
      results: The `metric_hooks.Result` of each value that a metric returned
        for the global batch.
      unaggregated: User-defined variables that were written without a rule
        for replicas that differ.
      sizes: Possible numbers of rows, in the order of the trace: the size,
        whether it was taken for the number of rows, and what received it.
      replica_uses: Members of the replica context that the step used.
      global_batch_reason: The reason that the step cannot be mapped over the
        replicas, or None; set by `demand_global_batch`.
    """

    replica_seeds: IdentitySet = dataclasses.field(default_factory=IdentitySet)
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
      facts: Facts that are known before the trace.
      flags: The kind of code that is running.
      notes: Notes of the hooks.
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
        """Number of replicas with rows; a mean of losses is over these."""
        of_replicas = self.facts.rows_of_replicas or ()
        return sum(rows > 0 for rows in of_replicas) or self.num_replicas

    @property
    def weight(self) -> float:
        """The factor of this replica's mean over rows; 1 if rows are even."""
        of_replicas = self.facts.rows_of_replicas
        if of_replicas is None:
            return 1.0
        return self.facts.rows * self.num_sharing / sum(of_replicas)

    @property
    def is_empty(self) -> bool:
        """Whether this replica has no rows; NaN in its gradients is ignored."""
        return set(self.facts.rows_of_all) == {0}

    @property
    def sees_replica_rows(self) -> bool:
        """Whether code sees only this replica's rows, outside of metrics."""
        return not (self.flags.sees_global_batch or self.flags.in_metric)

    @property
    def buffering(self) -> Buffering | None:
        """The rule for arrays that share a buffer when they are reduced."""
        return choose_buffering(self.facts.mesh)

    def with_facts(self, **facts: object) -> "StepContext":
        """Returns the same trace with other facts; flags, notes are shared."""
        return dataclasses.replace(
            self, facts=dataclasses.replace(self.facts, **facts)
        )

    def make_probe(self, rows: int) -> "StepContext":
        """Makes a new trace of the same step with another number of rows."""
        facts = StepFacts(mesh=self.facts.mesh, rows=rows, is_probe=True)
        return StepContext(facts=facts)

    def note_size(self, size: float, is_rows: bool, of: str) -> None:
        """Notes a size for a probe to confirm (trace_checks.py).

        Args:
          size: A dimension, or a number.
          is_rows: Whether it was taken for the number of rows.
          of: A description of what received it, for messages.
        """
        is_known = self.flags.in_compiled or self.flags.in_metric
        if not (is_known or self.facts.is_local):
            self.notes.sizes.append((size, is_rows, of))

    def demand_global_batch(self, reason: str) -> NoReturn:
        """Aborts the trace; the step falls back to the global batch.

        Args:
          reason: A sentence for the warning: what the step does, and how to
            change it so that it can be mapped over the replicas.

        Raises:
          GlobalBatchNeeded: if the step is not in `run`.
          ValueError: if it is.
        """
        if self.facts.is_local:
            raise ValueError(
                "The replicas' updates in `run` cannot be combined. Received: "
                f"{reason}."
            )
        self.notes.global_batch_reason = reason
        raise GlobalBatchNeeded(reason)

    def note_replica_use(self, name: str) -> None:
        """Notes that the step used a member of its replica context.

        Raises:
          ReplicaNeeded: if the trace sees the global batch.
        """
        _Uses.count += 1
        if self.facts.is_global_batch:
            raise ReplicaNeeded(name)
        self.notes.replica_uses.append(name)

    def flag(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Sets one of the flags while a block runs."""
        return temporary_attribute(self.flags, name, True)


class _Uses:
    count = 0


def count_replica_uses() -> int:
    """Returns how often steps of this process used their replica context.

    Traces are named by this count (`separate_trace`): a later trace does not
    reuse inner functions that JAX cached in one that used its context.
    """
    return _Uses.count


ReplicaScope = Callable[
    [StepContext | None], contextlib.AbstractContextManager[Any]
]
"""Makes a step's replica context current for a block; with None, that of a
single replica."""

current_step: Callable[[], StepContext | None] = _current.current_step
"""Returns the step that this thread is tracing for one of several replicas."""

step_scope = _current.step_scope
"""Makes a step this thread's current step while a block runs."""


@contextlib.contextmanager
def building(mesh: ReplicaMesh, replica_scope: ReplicaScope) -> Iterator[None]:
    """Builds models inside the block with the shapes of a replica's step.

    Args:
      mesh: The mesh of the replicas.
      replica_scope: Makes a step's replica context current.
    """
    step = StepContext(facts=StepFacts(mesh=mesh, rows=1))
    alone = replay.Alone(mesh.num_replicas)
    with replay.replay_scope(alone), replica_scope(step):
        yield
