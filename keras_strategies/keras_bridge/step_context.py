"""The context of a replica-mapped step while it is traced.

A replica-mapped step is traced with the rows of one replica, and the program
then runs on every replica. A step is traced in one thread, so its context is
thread-local. Hooks that are installed during the trace find no context in other
threads, and change nothing there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from keras_strategies.passes import replay
from keras_strategies.passes.specs import Axis
from keras_strategies.spmd.identity import (
    IdentityMap,
    IdentitySet,
    temporary_attribute,
)
from keras_strategies.spmd.mesh import ReplicaMesh

Group = list[Any]
"""The values of a list of variables, in the same order. Each value has its
variable's shape. In a replica-mapped step these are the values on one
replica."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Properties of a step that are fixed before it is traced.

    Attributes:
      mesh: The mesh of the replicas.
      rows: Number of rows in this replica's part of the batch.
      is_local: Whether the step is a function passed to `run` instead of a
        model's step. In such a function a loss is computed from one replica's
        rows, and the optimizer sums the replicas' gradients.
      is_retrace: Whether this is a further trace with another number of rows,
        made only to find out what depends on the number of rows.
      growth: The number of rows of such a trace, divided by that of a replica.
      sums_later: Whether accumulated gradients are summed over the replicas
        only in the optimizer's updates.
      is_ragged: Whether replicas may run different branches of the program,
        because their numbers of rows differ.
      rows_of_all: Describes the arguments whose number of rows depends on the
        replica. A key is the number of rows that such an argument has on this
        replica. The value is a set of tuples with the numbers of rows on all
        replicas. It has several tuples if arguments have the same number of
        rows on this replica, but not on all others.
      rows_of_replicas: Number of rows of each replica, if the replicas run a
        model's step on different numbers of rows; else None.
      global_reason: If the step is traced with the global batch instead of one
        replica's rows: the reason, as text for an error. Otherwise None.
      share: This replica's weight when state, such as moving averages, is
        averaged over the replicas: a number or a traced scalar, which is 0 if
        the replica has no rows. None if all replicas have the same weight.
      loss_tracker: The metric that Keras's step updates with the loss and the
        number of rows.
    """

    mesh: ReplicaMesh
    rows: int
    is_local: bool = False
    is_retrace: bool = False
    growth: float = 1.0
    sums_later: bool = False
    is_ragged: bool = False
    rows_of_all: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    rows_of_replicas: tuple[int, ...] | None = None
    global_reason: str | None = None
    share: Any = None
    loss_tracker: Any = None


@dataclass(kw_only=True)
class StepFlags:
    """Flags that tell the hooks which kind of code is being traced.

    They are set only by `StepContext.flag`.

    Attributes:
      sees_global_batch: Whether the code already gets the rows of the global
        batch.
      in_optimizer: Whether an optimizer is being applied. An inner optimizer
        that it calls receives gradients that are already reduced.
      in_metric: Whether a metric is being updated or read. An inner metric
        that it calls is a part of it.
      in_scaling: Whether a loss is being scaled.
      in_assign: Whether a variable is being written with a value that was
        already combined from all replicas.
      in_update: Whether the function writes the same value to all copies of a
        variable (`extended.update`).
      in_loss: Whether a loss is being computed. An inner loss that it calls
        is a part of it.
      in_compiled: Whether losses or metrics that were passed to `compile` are
        being called. The first dimension of their arguments is certainly the
        batch's rows.
    """

    sees_global_batch: bool = False
    in_optimizer: bool = False
    in_metric: bool = False
    in_scaling: bool = False
    in_assign: bool = False
    in_update: bool = False
    in_loss: bool = False
    in_compiled: bool = False


@dataclass(kw_only=True)
class StepNotes:
    """The information that the hooks record during a trace.

    It is read by other hooks, and by the code that combines the replicas'
    states after the step.

    Attributes:
      replica_seeds: Seeds whose random streams differ between replicas.
      scaled_losses: Optimizers that scaled the loss, which also multiplied it
        by 1/replicas. Their gradients must be summed, not averaged.
      equal: Values that are equal on all replicas, such as those that an
        optimizer computed from reduced gradients.
      metric_rules: For a metric's variable, the rule by which the replicas'
        values are combined. By default the replicas' changes are summed.
      before: For a variable of a metric, the value on this replica from which
        the variable's change is computed: the value before the step or, if
        the metric was reset in the step, the value after the reset.
      results: For each value that a metric returned for the global batch, its
        `metric_hooks.Result`.
      summands: The values in the trace that are this replica's summands of an
        accumulator of gradients (hooks/summands.py).
      unaggregated: User-defined variables that were written, but have no
        `aggregation` that defines how different values are combined.
      sizes: Sizes that may be the number of rows, in the order of recording.
        Each entry is a tuple: the size, whether the size was assumed to be the
        number of rows, and a description of the function that received the
        array.
      replica_uses: Names of the members of the replica context that the step
        used.
      global_batch_reason: The reason that the step cannot be mapped over the
        replicas, or None; set by `demand_global_batch`.
    """

    replica_seeds: IdentitySet = field(default_factory=IdentitySet)
    scaled_losses: IdentitySet = field(default_factory=IdentitySet)
    equal: IdentitySet = field(default_factory=IdentitySet)
    metric_rules: IdentityMap[str] = field(default_factory=IdentityMap)
    before: IdentityMap[Any] = field(default_factory=IdentityMap)
    results: IdentityMap[Any] = field(default_factory=IdentityMap)
    summands: IdentitySet = field(default_factory=IdentitySet)
    unaggregated: IdentitySet = field(default_factory=IdentitySet)
    sizes: list[tuple[float, bool, str]] = field(default_factory=list)
    replica_uses: list[str] = field(default_factory=list)
    global_batch_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The context of one replica-mapped step, which the hooks read.

    Attributes:
      facts: Properties of the step that are fixed before the trace.
      flags: Flags that tell which kind of code is being traced.
      notes: The information that the hooks record during the trace.
    """

    facts: StepFacts
    flags: StepFlags = field(default_factory=StepFlags)
    notes: StepNotes = field(default_factory=StepNotes)

    @property
    def axis(self) -> Axis:
        """The mesh axis or axes of all replicas, for collectives."""
        return self.facts.mesh.all_replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.facts.mesh.num_replicas

    @property
    def num_sharing(self) -> int:
        """Number of replicas that have rows; only their losses are averaged."""
        replica_rows = self.facts.rows_of_replicas or ()
        return sum(rows > 0 for rows in replica_rows) or self.num_replicas

    @property
    def weight(self) -> float:
        """The factor by which this replica's mean loss is multiplied.

        It is 1 if all replicas have the same number of rows.
        """
        replica_rows = self.facts.rows_of_replicas
        if replica_rows is None:
            return 1.0
        return self.facts.rows * self.num_sharing / sum(replica_rows)

    @property
    def is_empty(self) -> bool:
        """Whether this replica has no rows, so its gradients may be NaN."""
        return set(self.facts.rows_of_all) == {0}

    @property
    def sees_replica_rows(self) -> bool:
        """Whether the code gets only this replica's rows.

        False inside metrics.
        """
        return not (self.flags.sees_global_batch or self.flags.in_metric)

    def with_facts(self, **facts: object) -> "StepContext":
        """Returns a context with changed facts and the same flags and notes.

        Args:
          **facts: The attributes of `StepFacts` to replace.
        """
        return replace(self, facts=replace(self.facts, **facts))

    def note_size(self, size: float, is_rows: bool, of: str) -> None:
        """Records a size that may be the number of rows.

        A second trace with another number of rows checks whether the size
        changes with the number of rows (step/analysis.py).

        Args:
          size: A dimension of an array, or a number.
          is_rows: Whether the size is assumed to be the number of rows.
          of: A description of the function or metric that received the array
            or number, for messages.
        """
        is_known = self.flags.in_compiled or self.flags.in_metric
        if not (is_known or self.facts.is_local):
            self.notes.sizes.append((size, is_rows, of))

    def demand_global_batch(self, reason: str) -> None:
        """Records that the step must run over the global batch, and why.

        Args:
          reason: Text for the warning: what the step does, and how to change
            it so that it can be mapped over the replicas.

        Raises:
          ValueError: if the step is a function passed to `run`.
        """
        if self.facts.is_local:
            raise ValueError(
                "The updates that the replicas make in `run` cannot be "
                f"combined. Received: {reason}."
            )
        if self.notes.global_batch_reason is None:
            self.notes.global_batch_reason = reason

    def note_replica_use(self, name: str) -> None:
        """Records that the step used a member of its replica context.

        Raises:
          RuntimeError: if the step is traced with the global batch.
        """
        _Uses.count += 1
        if self.facts.global_reason is not None:
            raise replica_use_error(name, self.facts.global_reason)
        self.notes.replica_uses.append(name)

    def flag(self, name: str) -> AbstractContextManager[None]:
        """Sets one of the attributes of `StepFlags` while the block runs."""
        return temporary_attribute(self.flags, name, True)


def replica_use_error(name: str, reason: str) -> RuntimeError:
    """Makes the error of a step over the global batch that uses a replica's.

    Args:
      name: The member of the replica context that the step uses.
      reason: The reason why the step runs over the global batch.
    """
    return RuntimeError(
        "A step that runs over the global batch must not use a replica "
        f"context. Received: a use of `{name}` of a replica context, in a step "
        f"that must run over the global batch for this reason: {reason}. "
        "Remove that use, or change the step so that the reason no longer "
        "applies."
    )


class _Uses:
    count = 0


def count_replica_uses() -> int:
    """Returns how often steps of this process used their replica context.

    `separate_trace` makes the count a part of a trace's name. JAX caches the
    traces of inner functions by this name, so that a later trace does not reuse
    an inner trace in which the replica context was used.
    """
    return _Uses.count


ReplicaScope = Callable[[StepContext | None], AbstractContextManager[Any]]
"""A function that returns a context manager, which enters a step's replica
context; for None, that of a single replica."""


class _Current(threading.local):
    step: StepContext | None = None


_current = _Current()


def current_step() -> StepContext | None:
    """Returns the replica-mapped step that this thread is tracing, or None."""
    return _current.step


def step_scope(step: StepContext) -> AbstractContextManager[None]:
    """Makes a step the current step of this thread while the block runs."""
    return temporary_attribute(_current, "step", step)


@contextmanager
def building(mesh: ReplicaMesh, replica_scope: ReplicaScope) -> Iterator[None]:
    """Enters a replica context in which models can be built.

    Models that are built in the block see the shapes of one replica, as in a
    replica-mapped step.

    Args:
      mesh: The mesh of the replicas.
      replica_scope: Makes the context manager of a step's replica context.
    """
    step = StepContext(facts=StepFacts(mesh=mesh, rows=1))
    alone = replay.Alone(mesh.num_replicas)
    with replay.replay_scope(alone), replica_scope(step):
        yield
