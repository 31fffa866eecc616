"""Which strategy a thread is in."""

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_strategies.strategy.strategy import Strategy


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entered: list[Strategy] = []
        self.set_globally: contextlib.ExitStack | None = None


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


def check_not_mixing(strategy: "Strategy") -> None:
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
