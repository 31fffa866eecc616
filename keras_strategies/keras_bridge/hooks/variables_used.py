"""The variables that a function reads and writes."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies.keras_bridge.patches import Patches


class LiftingScope(keras.StatelessScope):
    """A stateless scope that notes every variable it is asked for.

    To be entered around an abstract trace: the values it answers with are
    zeros, and variables that are created in it get theirs when it is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[int, keras.Variable] = {}
        self.written: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The value written last, or zeros."""
        value = super().get_current_value(variable)
        if value is not None:
            return value
        self.variables[id(variable)] = variable
        # Not kept: the trace that asks may be an inner one.
        return jnp.zeros(variable.shape, variable.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes a variable that is written."""
        variable, _ = update
        self.variables[id(variable)] = variable
        self.written[id(variable)] = variable
        super().add_update(update)


def _asking_outwards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_current_value(scope: Any, variable: keras.Variable) -> Any:
        value = original(scope, variable)
        outer = getattr(scope, "original_scope", None)
        if value is None and outer is not None:
            return outer.get_current_value(variable)
        return value

    return get_current_value


class InnerScope(keras.StatelessScope):
    """A stateless scope that asks the one around it for other variables.

    Keras's own would answer with what the variable holds outside of any
    scope, which a trace bakes in as a constant.

    Args:
      mapping: Pairs of a variable and its value.

    Attributes:
      written: The variables that were written in it, by their ids.
    """

    def __init__(self, mapping: Iterable[tuple[keras.Variable, Any]]) -> None:
        super().__init__(list(mapping), initialize_variables=False)
        self.written: dict[int, keras.Variable] = {}

    get_current_value = _asking_outwards(keras.StatelessScope.get_current_value)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes a variable that is written."""
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def scopes_ask_outwards() -> contextlib.AbstractContextManager[None]:
    """Lets Keras's own inner stateless scopes ask outwards, for a trace."""
    return _patches.held()


_patches = Patches(
    lambda: [(keras.StatelessScope, "get_current_value", _asking_outwards)]
)
