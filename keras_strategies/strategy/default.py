"""The default strategy, its datasets, and the current strategy."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax

from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.source import Source
from keras_strategies.fit.inputs.choose_source import (
    LoopData,
    make_loop_source,
)
from keras_strategies.fit.inputs.keras_sources import FeedAdapter
from keras_strategies.keras_bridge.keras_names import DATA_ADAPTERS
from keras_strategies.keras_bridge.patches import Patches
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

    def _make_distributed(self, source: Source) -> DistributedDataset:
        return adapt_to_plain_loops(
            super()._make_distributed(source), self.mesh
        )


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


class PlainFeed(FeedAdapter):
    """A Keras data adapter for a distributed dataset with one replica.

    Args:
      dataset: The dataset. Each iteration over it is an epoch.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._started: tuple[Tree, Iterator[Tree]] | None = None

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Yields batches as host arrays."""
        return (jax.device_get(batch) for batch in self.get_jax_iterator())

    def get_jax_iterator(self, super_batch: object = None) -> Iterator[Tree]:
        """Yields batches on the device; see `Feed.get_jax_iterator`."""
        del super_batch
        started, self._started = self._started, None
        batches = started[1] if started else iter(self._dataset)
        for first in [started[0]] if started else batches:
            # Keras reads one batch to build the model. This batch is stored, so
            # that the next iterator yields it again for training.
            self._started = first, batches
            yield first
            self._started = None
            yield from batches

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._dataset.source.num_batches

    @property
    def batch_size(self) -> int | None:
        """Number of rows of a batch, if known."""
        return self._dataset.source.batch_size


def adapt_to_plain_loops(
    dataset: DistributedDataset, mesh: ReplicaMesh
) -> DistributedDataset:
    """Makes plain Keras models accept a distributed dataset with one replica.

    Args:
      dataset: The dataset. The patch is removed when the dataset is deleted.
      mesh: The mesh, which has one replica.

    Returns:
      `dataset`.
    """
    patched = contextlib.ExitStack()
    patched.enter_context(_patches.hold())
    weakref.finalize(dataset, patched.close)
    _meshes[dataset] = mesh
    return dataset


_meshes: weakref.WeakKeyDictionary[DistributedDataset, ReplicaMesh]
_meshes = weakref.WeakKeyDictionary()


def _add_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_data_adapter(x: Dataset, *args: Any, **kwargs: Any) -> Any:
        mesh = _meshes.get(x) if isinstance(x, DistributedDataset) else None
        if mesh is None:
            return original(x, *args, **kwargs)
        data = LoopData(x=x, **kwargs)
        source = make_loop_source(mesh, data, name="fit", facts={})
        return PlainFeed(DistributedDataset(source, mesh))

    return get_data_adapter


_patches = Patches(lambda: [(DATA_ADAPTERS, "get_data_adapter", _add_adapter)])
