"""The default strategy: what `get_strategy` returns outside of scopes."""

import functools

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.strategy.scope import Scope
from keras_strategies.strategy.strategy import Strategy


class DefaultStrategy(Strategy):
    """One replica on the default device; its scope changes nothing."""

    def __init__(self) -> None:
        super().__init__(ReplicaMesh(devices=(jax.local_devices()[0],)))

    def scope(self) -> "DefaultScope":
        """Returns a scope in which Keras is as it is."""
        return DefaultScope(self)


class DefaultScope(Scope):
    """The scope of the default strategy."""

    def __enter__(self) -> Strategy:
        """Checks that no other strategy's scope is open."""
        self._strategy._check_context()
        return self._strategy

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""


@functools.cache
def default_strategy() -> DefaultStrategy:
    """The one default strategy of this process."""
    return DefaultStrategy()
