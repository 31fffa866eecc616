"""`strategy.extended`: tf's names for libraries, computed from the runtime."""

import jax
import keras

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
