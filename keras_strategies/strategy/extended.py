"""`strategy.extended`: methods for library authors, as in TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.spmd.values import Mirrored, ReduceOp, select_components
from keras_strategies.strategy import current, reducing
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime


class StrategyExtended:
    """The methods of a strategy that are intended for library authors.

    Args:
      runtime: The strategy's mesh, variables and distribution.
      runner: The object that compiles and runs functions for the replicas.
      is_multi_worker: Whether the strategy is a `MultiWorkerMirroredStrategy`.

    Example:
      ```python
      def merge_fn(strategy, x):
          return strategy.extended.reduce_to("sum", x, destinations=x)

      def replica_fn(x):
          return ks.get_replica_context().merge_call(merge_fn, args=(x,))

      sums = strategy.run(replica_fn, args=batch[:1])
      ```
    """

    def __init__(
        self,
        runtime: Runtime,
        runner: Runner,
        *,
        is_multi_worker: bool = False,
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._is_multi_worker = is_multi_worker

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices of the replicas, in the order of replica ids.

        If a replica has several cores, only its first core is listed.
        """
        return self._runtime.mesh.first_devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that store copies of variables: all devices."""
        return tuple(self._runtime.mesh.devices)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs a copy of the script.

        True for `MultiWorkerMirroredStrategy`, even with a single process.
        """
        return self._is_multi_worker

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        destinations: object,
        options: object = None,
    ) -> Tree:
        """Reduces values elementwise over the replicas.

        The result is on all devices. May be called outside of replica
        functions, and in a function given to `merge_call`.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: A nest of `PerReplica`.
          destinations: Not used: the result is on all of the strategy's
            devices.
          options: Not used.

        Returns:
          The nest, with each `PerReplica` replaced by an array.

        Raises:
          RuntimeError: if called inside of a replica's function.
        """
        current.check_cross_replica("reduce_to")
        self._runtime.mesh.check_can_run()
        return reducing.reduce(reduce_op, value, None, self._runtime.mesh)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: object = None,
    ) -> list[Any]:
        """Reduces several values; see `reduce_to`.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value_destination_pairs: Pairs of a value and a destination.
          options: Not used.
        """
        pairs = value_destination_pairs
        return [self.reduce_to(reduce_op, v, place) for v, place in pairs]

    def update(
        self,
        var: keras.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(var, *args, **kwargs)` for every copy of a variable.

        May be called outside of replica functions, and in a function given to
        `merge_call`. In `fn`, `var.assign`, `assign_add` and `assign_sub` write
        to the copy.

        Args:
          var: A variable.
          fn: The function that changes it. It must assign the same value to all
            copies, unless the variable has `synchronization="on_read"`.
          args: Positional arguments. A `PerReplica` is replaced by the
            component of the replica that owns the copy.
          kwargs: Keyword arguments, treated like `args`.
          group: Whether to return None instead of the results.

        Returns:
          None if `group`. Otherwise a tuple with the result of `fn` for each
          copy; in a function given to `merge_call`, the single traced result.

        Raises:
          ValueError: if the copies were assigned different values.
          TypeError: if `var` is not a variable.
          RuntimeError: if called inside of a replica's function.
        """
        _check_variable("update", var)
        current.check_cross_replica("update")
        positional: tuple[Any, ...] = (var, *args)
        keywords: dict[str, Any] = kwargs or {}
        step = current_step()
        if step is None:
            result = self._runner(fn, positional, keywords, is_update=True)
            mesh = self._runtime.mesh
            return None if group else reducing.list_local_results(result, mesh)
        positional, keywords = select_components((positional, keywords))
        with step.flag("in_update"):
            result = fn(*positional, **keywords)
        return None if group else result

    def broadcast_to(
        self, tensor: Array, destinations: object = None
    ) -> jax.Array | Mirrored:
        """Copies a value to every device.

        Args:
          tensor: An array or a number.
          destinations: Not used: the copies are on all of the strategy's
            devices.

        Returns:
          A `Mirrored`; an array if the strategy has only one replica.
        """
        current.check_cross_replica("broadcast_to")
        mesh = self._runtime.mesh
        mesh.check_can_run()
        array = jax.device_put(jax.numpy.asarray(tensor), mesh.whole)
        return array if mesh.num_replicas == 1 else Mirrored(array, mesh)

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tree:
        """Calls `Strategy.run`, the new name of this method.

        Args:
          fn: The function.
          args: The function's positional arguments.
          kwargs: The function's keyword arguments.

        Returns:
          The result of `Strategy.run`.
        """
        current.check_outside("call_for_each_replica")
        return self._runner(fn, args, kwargs or {})

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Returns whether `v` was created in this strategy's scope.

        Returns False for a variable that was created elsewhere and moved to
        the strategy's devices by `compile` or `attach`.
        """
        _check_variable("variable_created_in_scope", v)
        return v in self._runtime.registry


def _check_variable(name: str, value: object) -> None:
    if not isinstance(value, keras.Variable):
        raise TypeError(
            f"`{name}` expects a Keras variable. Received: an object of type "
            f"{type(value).__name__}. Pass, for example, `layer.variables[i]`."
        )
