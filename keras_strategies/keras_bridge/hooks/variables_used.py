"""The variables that a function uses, and the losses that its layers add.

A layer holds the losses of its last call: without a scope in a list, in a
stateless scope as ids of entries of the scope's list. The ids belong to the
scope here, so that none outlives it and threads do not clear each other's.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Self

import jax.numpy as jnp
import keras
from jax.extend.core import get_opaque_trace_state
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_strategies._core.identity import IdentityMap, IdentitySet
from keras_strategies._types import Array
from keras_strategies.keras_bridge.patches import Patches


class CollectingScope(keras.StatelessScope):
    """A stateless scope in which `layer.losses` contains what layers add.

    One that is entered within another starts with that one's losses.

    Args:
      mapping: Pairs of a variable and its value.
      initialize_variables: Whether variables that are created in it get their
        values when it is left.

    Attributes:
      written: The variables that were written in it.
    """

    def __init__(
        self,
        mapping: Iterable[tuple[keras.Variable, Any]] = (),
        *,
        initialize_variables: bool = True,
    ) -> None:
        super().__init__(list(mapping), True, initialize_variables)
        self._ids: IdentityMap[set[int]] = IdentityMap()
        # Losses of the scope around, and of a trace within this one's, as of a
        # scan's body: neither can be returned by this scope's trace.
        self._outer = IdentitySet()
        self._inner = IdentitySet()
        self._trace_state: Any = None
        self.written = IdentitySet()

    def __enter__(self) -> Self:
        super().__enter__()
        self._trace_state = get_opaque_trace_state()
        if isinstance(self.original_scope, CollectingScope):
            self._take(self.original_scope, self.original_scope.losses)
            self._outer.update(self.losses)
        return self

    def add_loss(self, loss: Array) -> None:
        """Keeps a loss."""
        super().add_loss(loss)
        if get_opaque_trace_state() != self._trace_state:
            self._inner.add(loss)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes a variable that is written."""
        self.written.add(update[0])
        super().add_update(update)

    def ids_of(self, layer: keras.Layer) -> set[int]:
        """Returns the ids of a layer's losses, to be changed in place."""
        if layer not in self._ids:
            self._ids[layer] = set()
        return self._ids[layer]

    def outputs(self) -> list[Any]:
        """Returns the losses for its trace to return; None for others'."""
        return [
            None if loss in self._inner or loss in self._outer else loss
            for loss in self.losses
        ]

    def hand_out(self, outputs: list[Any]) -> None:
        """Gives the losses to the scope around this one, after its exit.

        Args:
          outputs: What `outputs` returned, as the trace around sees it.
        """
        pairs = [
            # JAX refuses to compute with one of a trace that has ended.
            (loss, loss if output is None else output)
            for loss, output in zip(self.losses, outputs, strict=True)
        ]
        outer = self.original_scope
        if isinstance(outer, CollectingScope):
            is_within = get_opaque_trace_state() != outer._trace_state
            outer._inner.update(
                value
                for loss, value in pairs
                if loss in self._inner
                or (is_within and loss not in self._outer)
            )
            outer._take(self, [value for _, value in pairs])
        elif outer is None:
            for layer in self._ids:
                ids = self._ids[layer]
                layer._losses.extend(v for loss, v in pairs if id(loss) in ids)

    def _take(self, scope: "CollectingScope", values: list[Any]) -> None:
        """Replaces all losses by those of a scope, with other values."""
        pairs = list(zip(scope.losses, values, strict=True))
        new = {id(loss): id(value) for loss, value in pairs}
        self.losses[:] = values
        self._ids = IdentityMap(
            (layer, {new[k] for k in scope._ids[layer] if k in new})
            for layer in scope._ids
        )


class LiftingScope(CollectingScope):
    """A stateless scope that notes every variable it is asked for.

    To be entered around an abstract trace: the values it answers with are
    zeros, and variables that are created in it get theirs when it is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variables = IdentitySet()

    def get_current_value(self, variable: keras.Variable) -> Array:
        """The value written last, or zeros.

        Returns:
          An array of the variable's shape.
        """
        value = super().get_current_value(variable)
        if value is not None:
            return value
        self.variables.add(variable)
        # Not kept: the trace that asks may be an inner one.
        return jnp.zeros(variable.shape, variable.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes a variable that is written."""
        self.variables.add(update[0])
        super().add_update(update)


def _asking_outwards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_current_value(
        scope: keras.StatelessScope, variable: keras.Variable
    ) -> Array | None:
        value = original(scope, variable)
        outer = getattr(scope, "original_scope", None)
        if value is None and outer is not None:
            return outer.get_current_value(variable)
        return value

    return get_current_value


class InnerScope(CollectingScope):
    """A stateless scope that asks the one around it for other variables.

    Keras's own would answer with what the variable holds outside of any
    scope, which a trace bakes in as a constant.

    Args:
      mapping: Pairs of a variable and its value.
    """

    def __init__(self, mapping: Iterable[tuple[keras.Variable, Any]]) -> None:
        super().__init__(mapping, initialize_variables=False)

    get_current_value = _asking_outwards(keras.StatelessScope.get_current_value)


def scopes_ask_outwards() -> contextlib.AbstractContextManager[None]:
    """Lets Keras's own inner stateless scopes ask outwards, for a trace.

    And lets layers' losses belong to the scope in which they are added.
    """
    return _patches.held()


def _get_loss_ids(layer: keras.Layer) -> set[int]:
    scope = get_stateless_scope()
    if isinstance(scope, CollectingScope):
        return scope.ids_of(layer)
    return vars(layer)["_loss_ids"]


def _set_loss_ids(layer: Any, ids: set[int]) -> None:
    vars(layer)["_loss_ids"] = ids


_patches = Patches(
    lambda: [
        (keras.StatelessScope, "get_current_value", _asking_outwards),
        (
            keras.Layer,
            "_loss_ids",
            lambda _: property(_get_loss_ids, _set_loss_ids),
        ),
    ]
)
