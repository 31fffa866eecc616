"""`ReplicaContext`: a function's access to the replica that it runs for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from numpy.lib.array_utils import normalize_axis_index

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.fit.inputs import agree_source
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes import replay
from keras_strategies.passes.lockstep import Turn
from keras_strategies.spmd.host_arrays import from_tensor
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    all_concatenate,
    all_sum,
    replica_id,
)
from keras_strategies.spmd.values import (
    LOCAL,
    STACKED,
    PerReplica,
    ReduceOp,
    as_reduce_op,
    select_components,
    stack_replicas,
)
from keras_strategies.strategy import current
from keras_strategies.strategy.reducing import to_summable


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica for which a value is created.

    Attributes:
      replica_id_in_sync_group: The replica's id.
      num_replicas_in_sync: The number of replicas.

    Example:
      ```python
      def value_fn(context):
          return float(context.replica_id_in_sync_group)

      ids = strategy.experimental_distribute_values_from_function(value_fn)
      assert strategy.reduce("sum", ids, axis=None) == sum(
          range(strategy.num_replicas_in_sync)
      )
      ```
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def distribute_values(
    name: str, value_fn: Callable[[ValueContext], Any], mesh: ReplicaMesh
) -> Tree:
    """Implements `Strategy.experimental_distribute_values_from_function`.

    Args:
      name: The name of that method.
      value_fn: Its argument.
      mesh: The mesh of the strategy's replicas.
    """
    count, name = mesh.num_replicas, f"`{name}`"

    def make() -> list[Any]:
        ids = mesh.local_replicas
        nests = [value_fn(ValueContext(i, count)) for i in ids]
        return jax.tree.map(from_tensor, nests)

    nests = agree_source.build_equal_replicas(mesh, name, make)
    if count == 1:
        return nests[0]
    structures = [jax.tree.structure(nest) for nest in nests]
    if any(one != structures[0] for one in structures):
        raise ValueError(
            f"The function given to {name} must return nests of the same "
            f"structure for all replicas. Received: {structures}. Return "
            "equal structures."
        )
    if mesh.num_processes == 1:
        return jax.tree.map(lambda *parts: PerReplica(parts), *nests)
    return jax.tree.map(
        lambda *parts: PerReplica.of(stack_replicas(parts, mesh), STACKED),
        *nests,
    )


class ReplicaContext:
    """The context of the replica that a function given to `run` runs for.

    `get_replica_context()` returns it. It is valid until the function returns.

    Args:
      strategy: The strategy.
      step: The state of the trace of the function given to `run`; None for the
        replica of the default strategy.

    Example:
      ```python
      def replica_fn(x):
          context = ks.get_replica_context()
          total = context.all_reduce(ks.ReduceOp.SUM, keras.ops.sum(x))
          return total / context.num_replicas_in_sync

      means = strategy.run(replica_fn, args=batch[:1])
      ```
    """

    def __init__(
        self, strategy: current.AnyStrategy, step: StepContext | None
    ) -> None:
        self._strategy = strategy
        self._step = step

    @property
    def strategy(self) -> current.AnyStrategy:
        """The strategy of the replica."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that gradients are aggregated over."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The replica's id: a traced int32 scalar; 0 outside of `run`.

        All replicas run one program, so Python cannot branch on the id: use
        `jnp.where` or `jax.lax.cond`.
        """
        self._check_current("replica_id_in_sync_group")
        return 0 if self._step is None else replica_id(self._step.axis)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of all replicas; see `extended.worker_devices`.

        Differs from tf, where this is only the device of this replica. A traced
        program runs on all devices, so there is no single device to return.
        """
        return self._strategy.extended.worker_devices

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Tree, options: object = None
    ) -> Tree:
        """Sums or averages a nest over the replicas. Collective.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or the name of one of
            them.
          value: A nest of arrays or numbers, with the same shapes on all
            replicas.
          options: Not used: XLA chooses how replicas communicate.

        Returns:
          The reduced nest, which is equal on every replica. It is
          differentiable: the gradient on each replica is the incoming gradients
          of all replicas, reduced in the same way.

        Example:
          ```python
          def replica_fn(x):
              context = ks.get_replica_context()
              return context.all_reduce("mean", keras.ops.mean(x))

          means = strategy.run(replica_fn, args=batch[:1])
          ```
        """
        self._check_current("all_reduce")
        op = as_reduce_op(reduce_op)
        leaves, structure = jax.tree.flatten(value)
        arrays = [to_summable(jnp.asarray(leaf), op) for leaf in leaves]
        if self._step is not None:
            arrays = all_sum(arrays, self._step.axis)
        if op is ReduceOp.MEAN:
            arrays = [a / self.num_replicas_in_sync for a in arrays]
        return jax.tree.unflatten(structure, arrays)

    def all_gather(
        self, value: Tree, axis: int, options: object = None
    ) -> Tree:
        """Concatenates a nest's arrays over the replicas. Collective.

        Args:
          value: A nest of arrays of at least one dimension.
          axis: The dimension to concatenate along.
          options: Not used.

        Returns:
          The nest of concatenated arrays, in the order of replica ids and equal
          on every replica. It is differentiable.

        Example:
          ```python
          def replica_fn(x):
              return ks.get_replica_context().all_gather(x, axis=0)

          rows = strategy.run(replica_fn, args=batch[:1])
          assert rows.values[0].shape[0] == 64
          ```
        """
        self._check_current("all_gather")

        def gather(leaf: Array) -> jax.Array:
            array = jnp.asarray(leaf)
            dim = normalize_axis_index(axis, array.ndim)
            if self._step is None:
                return array
            return all_concatenate(array, self._step.axis, dim)

        return jax.tree.map(gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once for all replicas.

        The function runs in the cross-replica context. Each array among its
        arguments becomes a `PerReplica`, which can be passed to
        `strategy.reduce`, `strategy.extended.reduce_to` or
        `strategy.extended.batch_reduce_to`.

        Differs from tf: the components of a `PerReplica` are on different
        devices of a traced program, so reading `.values` raises an error.

        Args:
          merge_fn: The function; every replica must call it.
          args: The function's positional arguments.
          kwargs: The function's keyword arguments.

        Returns:
          The result of `merge_fn`, in which each `PerReplica` is replaced by
          this replica's component.

        Example:
          ```python
          def merge_fn(strategy, x):
              return strategy.reduce("sum", x, axis=None)

          def replica_fn(x):
              return ks.get_replica_context().merge_call(merge_fn, (x,))

          totals = strategy.run(replica_fn, args=batch[:1])
          ```
        """
        self._check_current("merge_call")
        turn = replay.current.side
        if isinstance(turn, Turn):
            # All replicas must call `merge_call`, even if `merge_fn` calls no
            # collective.
            turn.meet(None, "a `merge_call`")
        merged, merged_kwargs = list(args), dict(kwargs or {})
        if self._step is not None:
            merged, merged_kwargs = jax.tree.map(
                _to_local, (merged, merged_kwargs)
            )
        with current.replica_context(self._strategy, None):
            result = merge_fn(self._strategy, *merged, **merged_kwargs)
        return select_components(result)

    def __enter__(self) -> "ReplicaContext":
        """Makes this replica context the current one again, as in tf."""
        current.stack.entered.append(self._strategy)
        current.stack.replicas.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the context."""
        current.stack.replicas.pop()
        current.stack.entered.pop()

    def _check_current(self, name: str) -> None:
        if self._step is not None:
            self._step.note_replica_use(name)
        is_outside = self._step is None and not current.stack.replicas
        if is_outside or current.stack.replicas[-1:] == [self]:
            return
        raise RuntimeError(
            "A replica context can be used only inside of the function in "
            "which `get_replica_context()` returned it. Received: a use of "
            f"`{name}` elsewhere. Call `get_replica_context()` again there."
        )


def _to_local(leaf: Leaf) -> Leaf:
    if isinstance(leaf, jax.Array):
        return PerReplica.of(leaf, LOCAL)
    return leaf
