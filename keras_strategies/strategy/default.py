"""The default strategy, its datasets, and the current strategy."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax

from keras_strategies.data.options import InputOptions
from keras_strategies.data.sources.from_function import InputContext
from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy import current
from keras_strategies.strategy.replica_context import ReplicaContext
from keras_strategies.strategy.scope import Scope
from keras_strategies.strategy.strategy import Strategy


class DefaultStrategy(Strategy):
    """One replica on the default device; its scope changes nothing."""

    def __init__(self) -> None:
        super().__init__(ReplicaMesh(devices=(jax.local_devices()[0],)))

    def scope(self) -> "DefaultScope":
        """Returns a scope that does not change Keras."""
        return DefaultScope(self)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Any:
        """Returns a dataset of tf.data itself, as in tf; see `Strategy`.

        So a plain Keras model accepts it, too.
        """
        tensorflow: Any = sys.modules.get("tensorflow")
        is_plain = tensorflow and isinstance(dataset, tensorflow.data.Dataset)
        if is_plain and dry_run.get() is None:
            return dataset
        return super().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Any:
        """Distributes the dataset that a function returns; see `Strategy`."""
        return self.experimental_distribute_dataset(dataset_fn(InputContext()))


class DefaultScope(Scope):
    """The scope of the default strategy."""

    def __enter__(self) -> Strategy:
        """Checks that no other strategy's scope is open."""
        strategy = cast(Strategy, self._strategy)
        strategy._check_context()
        current.stack.num_default_scopes += 1
        return strategy

    def __exit__(self, *error: object) -> None:
        """Leaves the scope; other strategies' scopes may then be entered."""
        current.stack.num_default_scopes -= 1


@functools.cache
def get_default_strategy() -> DefaultStrategy:
    """Returns the default strategy of this process."""
    return DefaultStrategy()


@functools.cache
def get_default_context() -> ReplicaContext:
    """Returns the context of the default strategy's replica."""
    return ReplicaContext(get_default_strategy(), None)


def get_strategy() -> Strategy:
    """Returns the current strategy; never None.

    Outside of all scopes this is the default strategy, which has one replica on
    the default device and a scope that changes nothing. A new thread starts
    outside of all scopes.

    Example:
      >>> with strategy.scope():
      ...     ks.get_strategy() is strategy
      True
      >>> ks.get_strategy().num_replicas_in_sync
      1
    """
    entered = current.get_entered_strategy()
    return cast(Strategy, entered or get_default_strategy())


def has_strategy() -> bool:
    """Returns whether the current strategy is not the default one.

    Example:
      >>> ks.has_strategy()
      False
      >>> with strategy.scope():
      ...     ks.has_strategy()
      True
    """
    entered = current.get_entered_strategy()
    return entered is not None and not isinstance(entered, DefaultStrategy)


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that the calling code runs for.

    In a function given to `run`, this is the context of the replica. In a
    strategy's scope, and in a function given to `merge_call`, the result is
    None, which means the cross-replica context. Outside of all scopes, it is
    the context of the default strategy's only replica.

    Example:
      ```python
      def replica_fn(x):
          return ks.get_replica_context().all_reduce("sum", x)

      sums = strategy.run(replica_fn, args=(ks.Mirrored(1.0),))
      ```
    """
    if current.stack.replicas:
        return current.stack.replicas[-1]
    if current.stack.entered:
        return None
    return get_default_context()


def in_cross_replica_context() -> bool:
    """Returns whether the calling code runs once for all replicas.

    True in a strategy's scope and in a function given to `merge_call`; False in
    a function given to `run`, and outside of all scopes.

    Example:
      >>> with strategy.scope():
      ...     ks.in_cross_replica_context()
      True
      >>> ks.in_cross_replica_context()
      False
    """
    return get_replica_context() is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enters a strategy's scope for the rest of the thread, without `with`.

    Args:
      strategy: The strategy to enter. It replaces the strategy that an earlier
        call has set. None only leaves the scope of that earlier strategy.

    Raises:
      RuntimeError: if called inside a `with strategy.scope()`.

    Example:
      >>> ks.experimental_set_strategy(strategy)
      >>> ks.get_strategy() is strategy
      True
      >>> ks.experimental_set_strategy(None)
    """
    is_set = current.stack.set_globally is not None
    if len(current.stack.entered) > int(is_set):
        raise RuntimeError(
            "`experimental_set_strategy` must not be called inside a "
            "strategy's `with` scope. Received: a call within the scope of "
            f"{current.stack.entered[-1]!r}. Leave the scope first."
        )
    if current.stack.set_globally is not None:
        leaving, current.stack.set_globally = current.stack.set_globally, None
        leaving.close()
    if strategy is not None and strategy is not get_strategy():
        entering = contextlib.ExitStack()
        entering.enter_context(strategy.scope())
        current.stack.set_globally = entering
