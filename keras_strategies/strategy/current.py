"""The current strategy and the current replica of a thread."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import jax

from keras_strategies.passes.traces import check_untransformed
from keras_strategies.strategy.runtime import Runtime

if TYPE_CHECKING:
    import keras


class AnyStrategy(Protocol):
    """The interface of strategies for modules that cannot import `Strategy`."""

    _runtime: Runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        ...

    @property
    def extended(self) -> Any:
        """The strategy's methods intended for library authors.

        Returns:
          A `StrategyExtended`.
        """
        ...

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the strategy's scope."""
        ...

    def attach(self, model: "keras.Model") -> "keras.Model":
        """Binds a model to this strategy and returns the model."""
        ...

    def _check_free(self, model: "keras.Model") -> None: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[AnyStrategy] = []
        self.set_globally: contextlib.ExitStack | None = None
        # The replica contexts of the functions that are running, outermost
        # first; None stands for a function given to `merge_call` or `update`.
        self.replicas: list[Any] = []
        # The number of open scopes of the default strategy, which are not in
        # `entered`.
        self.num_default_scopes = 0


stack = _Stack()
"""The open scopes of this thread, outermost first."""


def get_entered_strategy() -> AnyStrategy | None:
    """Returns the strategy whose scope this thread is in, or None."""
    return stack.entered[-1] if stack.entered else None


def check_cross_replica(name: str) -> None:
    """Raises RuntimeError if called inside a function given to `run`."""
    if stack.replicas and stack.replicas[-1] is not None:
        raise RuntimeError(
            "Method requires being in cross-replica context, use "
            "get_replica_context().merge_call(). Received: a call of "
            f"`{name}` inside of a function given to `run`. Call it outside "
            "of that function, or use a method of `get_replica_context()`."
        )


def check_outside(name: str) -> None:
    """Raises RuntimeError if called inside a function for replicas, or of JAX.

    These are the functions given to `run`, `merge_call` and `update`, and those
    that a transformation of JAX, such as `jax.jit`, traces.

    Args:
      name: The method that was called.
    """
    check_cross_replica(name)
    if stack.replicas:
        raise RuntimeError(
            f"`{name}` must not be called while the replicas run a function. "
            f"Call it outside of `run`, and of functions given to `merge_call` "
            f"or `update`."
        )
    check_untransformed(name)


@contextlib.contextmanager
def replica_context(strategy: AnyStrategy, context: object) -> Iterator[None]:
    """Makes a strategy and its replica context current while the block runs."""
    stack.entered.append(strategy)
    stack.replicas.append(context)
    try:
        yield
    finally:
        stack.replicas.pop()
        stack.entered.pop()


def check_not_mixing(strategy: Any) -> None:
    """Raises if another strategy's scope is open, or a mesh of the user's.

    Raises:
      RuntimeError: if this thread is in the scope of another strategy, or of
        `jax.set_mesh` with a mesh other than the strategy's.
    """
    entered = get_entered_strategy()
    if entered is not None and entered is not strategy:
        refuse_mixing(strategy, repr(entered))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or stack.replicas:
        return
    if mesh != strategy._runtime.mesh.mesh.abstract_mesh:
        raise RuntimeError(
            "While a strategy is used, JAX must have no other mesh than the "
            f"strategy's. Received: a mesh of shape {dict(mesh.shape)}, set by "
            "`jax.set_mesh`. Leave its block, or remove the call."
        )


def refuse_mixing(strategy: object, other: str) -> NoReturn:
    """Raises RuntimeError: a strategy is used in another strategy's scope."""
    raise RuntimeError(
        "Mixing different tf.distribute.Strategy objects. A strategy, and "
        "the models compiled in its scope, must be used in its scope or "
        f"outside of all scopes. Received: {strategy!r} in the scope of "
        f"{other}. Leave that scope first."
    )


_warned: set[str] = set()


def warn_of_old_name(old: str, new: str) -> None:
    """Warns once that a name is deprecated."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(
            f"`{old}` is deprecated. Use its new name, `{new}`.",
            DeprecationWarning,
            stacklevel=3,
        )
