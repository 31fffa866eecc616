"""Which strategy a thread is in."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_strategies.strategy.custom_loops import CustomLoops
    from keras_strategies.strategy.replica_context import ReplicaContext
    from keras_strategies.strategy.strategy import Strategy


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[Strategy] = []
        self.set_globally: contextlib.ExitStack | None = None
        # The replica whose function runs, None in a function that merges.
        self.replicas: list[ReplicaContext | None] = []


stack = _Stack()
"""The scopes that this thread has open, outermost first."""


def entered_strategy() -> "Strategy | None":
    """The strategy whose scope this thread is in, or None."""
    return stack.entered[-1] if stack.entered else None


def has_strategy() -> bool:
    """Whether this thread is in the scope of a strategy (not the default)."""
    return entered_strategy() is not None


def get_strategy() -> "Strategy":
    """Returns the current strategy, never None.

    Outside of scopes it is the default strategy: one replica on the default
    device, whose scope changes nothing. A new thread starts outside.
    """
    from keras_strategies.strategy.default import default_strategy

    return entered_strategy() or default_strategy()


def get_replica_context() -> "ReplicaContext | None":
    """Returns the replica that the calling code runs for.

    Inside of a function given to `run` it is that replica's context. In a
    strategy's scope, and in a function given to `merge_call`, it is None:
    that is the cross-replica context. Outside of scopes it is the one replica
    of the default strategy.

    Example:
      ```python
      def replica_fn(x):
          return ks.get_replica_context().all_reduce("sum", x)
      ```
    """
    if stack.replicas:
        return stack.replicas[-1]
    if stack.entered:
        return None
    from keras_strategies.strategy.replica_context import default_context

    return default_context()


def in_cross_replica_context() -> bool:
    """Whether the calling code runs once for all replicas.

    True in a strategy's scope and in a function given to `merge_call`; False
    inside of `run`, and outside of scopes.
    """
    return get_replica_context() is None


def check_cross_replica(name: str) -> None:
    """Raises RuntimeError inside of a replica's function."""
    if stack.replicas and stack.replicas[-1] is not None:
        raise RuntimeError(
            "Method requires being in cross-replica context, use "
            "get_replica_context().merge_call(). Received: a call of "
            f"`{name}` inside of a function given to `run`. Call it outside, "
            "or use the replica context's own methods."
        )


def check_outside(name: str) -> None:
    """Raises RuntimeError inside of a function given to `run`, or of a merge.

    Args:
      name: The method that was called.
    """
    check_cross_replica(name)
    if stack.replicas:
        raise RuntimeError(
            "Replicas cannot be started while others run. Received: a call "
            f"of `{name}` inside of a function given to `merge_call` or "
            "`update`. Call it outside of `run`."
        )


@contextlib.contextmanager
def replica_context(
    strategy: "Strategy", context: "ReplicaContext | None"
) -> Iterator[None]:
    """Makes `context` the current one of `strategy` for a block."""
    stack.entered.append(strategy)
    stack.replicas.append(context)
    try:
        yield
    finally:
        stack.replicas.pop()
        stack.entered.pop()


def experimental_set_strategy(strategy: "Strategy | None") -> None:
    """Enters a strategy's scope for the rest of the thread, without `with`.

    Args:
      strategy: The strategy to enter, in place of the one set before; None
        leaves that one and enters none.

    Raises:
      RuntimeError: called inside a `with strategy.scope()`.
    """
    is_set = stack.set_globally is not None
    if len(stack.entered) > int(is_set):
        raise RuntimeError(
            "`experimental_set_strategy` must not be called inside a "
            "strategy's `with` scope. Received: a call within the scope of "
            f"{stack.entered[-1]!r}. Leave the scope first."
        )
    if stack.set_globally is not None:
        leaving, stack.set_globally = stack.set_globally, None
        leaving.close()
    if strategy is not None and strategy is not get_strategy():
        entering = contextlib.ExitStack()
        entering.enter_context(strategy.scope())
        stack.set_globally = entering


def check_not_mixing(strategy: "CustomLoops") -> None:
    """Raises unless this thread is in no scope or in `strategy`'s.

    Raises:
      RuntimeError: another strategy's scope is open in this thread.
    """
    entered = entered_strategy()
    if entered is not None and entered is not strategy:
        raise RuntimeError(
            "Mixing different tf.distribute.Strategy objects. A strategy and "
            "the models compiled in its scope are used in its scope or "
            f"outside of all scopes. Received: {strategy!r} in the scope of "
            f"{entered!r}. Leave that scope first."
        )


_warned: set[str] = set()


def warn_of_old_name(old: str, new: str) -> None:
    """Warns once that a name is deprecated."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(
            f"`{old}` is the old name of `{new}`: use that.",
            DeprecationWarning,
            stacklevel=3,
        )
