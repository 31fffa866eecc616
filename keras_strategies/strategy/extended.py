"""`strategy.extended`: tf's names for libraries, computed from the runtime."""

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_strategies._core.reduce_op import ReduceOp
from keras_strategies.strategy import reducing
from keras_strategies.strategy.runtime import Runtime


class StrategyExtended:
    """A view of a strategy; holds no state of its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices that replicas run on, in the order of their ids."""
        return self._runtime.mesh.devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold variables: all of them, a copy each."""
        return self._runtime.mesh.devices

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Reduces a value elementwise over the replicas, onto all devices.

        Outside of replica functions, and in a function given to `merge_call`.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or their names.
          value: A nest of `PerReplica`.
          destinations: Not used: the result is on all of the strategy's
            devices.
          options: Not used.
        """
        return reducing.reduce(reduce_op, value, None, self._runtime.mesh)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces several values; see `reduce_to`.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or their names.
          value_destination_pairs: Pairs of a value and a destination.
          options: Not used.
        """
        return [
            self.reduce_to(reduce_op, value, destination)
            for value, destination in value_destination_pairs
        ]

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Whether `v` was created in this strategy's scope.

        A variable that was created elsewhere and moved to the strategy's
        devices by `compile` or `attach` was not.
        """
        if not isinstance(v, keras.Variable):
            raise TypeError(
                "`variable_created_in_scope` takes a Keras variable. "
                f"Received: {type(v).__name__}. Pass `layer.variables[i]`."
            )
        return v in self._runtime.registry
