"""The strategy and the replica that a thread is in."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from keras_strategies.strategy.runtime import Runtime

if TYPE_CHECKING:
    import keras


class AnyStrategy(Protocol):
    """A strategy, to the modules that strategies are made of."""

    _runtime: Runtime

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        ...

    @property
    def extended(self) -> Any:
        """tf's names for libraries.

        Returns:
          A strategy's `StrategyExtended`, or that of the default strategy.
        """
        ...

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns its scope."""
        ...

    def attach(self, model: "keras.Model") -> "keras.Model":
        """Makes a model this strategy's.

        Returns:
          The model.
        """
        ...

    def _check_free(self, model: "keras.Model") -> None: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[AnyStrategy] = []
        self.set_globally: contextlib.ExitStack | None = None
        # The replica whose function runs, None in a function that merges.
        self.replicas: list[Any] = []
        # Those of the default strategy, which are not among the entered.
        self.num_default_scopes = 0


stack = _Stack()
"""The scopes that this thread has open, outermost first."""


def entered_strategy() -> AnyStrategy | None:
    """The strategy whose scope this thread is in, or None."""
    return stack.entered[-1] if stack.entered else None


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
def replica_context(strategy: AnyStrategy, context: object) -> Iterator[None]:
    """Makes `context` the current one of `strategy` for a block."""
    stack.entered.append(strategy)
    stack.replicas.append(context)
    try:
        yield
    finally:
        stack.replicas.pop()
        stack.entered.pop()


def check_not_mixing(strategy: object) -> None:
    """Raises unless this thread is in no scope or in `strategy`'s.

    Raises:
      RuntimeError: another strategy's scope is open in this thread.
    """
    entered = entered_strategy()
    if entered is not None and entered is not strategy:
        refuse_mixing(strategy, repr(entered))


def refuse_mixing(strategy: object, other: str) -> NoReturn:
    """Raises RuntimeError: `strategy` is used in the scope of another one."""
    raise RuntimeError(
        "Mixing different tf.distribute.Strategy objects. A strategy and "
        "the models compiled in its scope are used in its scope or "
        f"outside of all scopes. Received: {strategy!r} in the scope of "
        f"{other}. Leave that scope first."
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
