"""The variables that a function uses, and the losses that its layers add.

A Keras layer stores the losses that its last call added. Outside of a stateless
scope, the layer stores a list of these losses. Inside, the scope stores a list
of the losses of all layers, and each layer stores the ids of its losses. A
scope of this module stores these ids itself, in place of the layers, so that
the ids do not outlive the scope, and threads do not clear each other's ids.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Self

import jax.numpy as jnp
import keras
from jax.extend.core import get_opaque_trace_state
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_strategies._types import Array
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.passes.traces import find_current_trace
from keras_strategies.spmd.identity import IdentityMap, IdentitySet


class CollectingScope(keras.StatelessScope):
    """A stateless scope in which `layer.losses` contains the added losses.

    A nested scope starts with the losses of the outer scope.

    Args:
      mapping: Pairs of a variable and its value.
      initialize_variables: Whether variables that are created in the scope
        get their values on exit.

    Attributes:
      written: The variables that were written in the scope.
    """

    def __init__(
        self,
        mapping: Iterable[tuple[keras.Variable, Any]] = (),
        *,
        initialize_variables: bool = True,
    ) -> None:
        super().__init__(list(mapping), True, initialize_variables)
        self._ids: IdentityMap[set[int]] = IdentityMap()
        # Losses that this scope's trace cannot return: losses of the outer
        # scope, and losses of a trace inside this scope's trace, such as the
        # body of a scan.
        self._outer = IdentitySet()
        self._inner = IdentitySet()
        self._trace_state: Any = None
        # While variables are searched, the trace in which they may be written.
        self._trace: Any = None
        self.written = IdentitySet()

    def __enter__(self) -> Self:
        super().__enter__()
        self._trace_state = get_opaque_trace_state()
        if isinstance(self.original_scope, CollectingScope):
            if self.original_scope._trace is not None:
                self._trace = find_current_trace()
            self._replace_losses(
                self.original_scope, self.original_scope.losses
            )
            self._outer.update(self.losses)
        return self

    def add_loss(self, loss: Array) -> None:
        """Adds a loss to the scope's list."""
        super().add_loss(loss)
        if get_opaque_trace_state() != self._trace_state:
            self._inner.add(loss)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Writes a variable, and records that it was written.

        Raises:
          RuntimeError: if a trace inside this scope's trace, such as a branch
            of a `cond`, writes the variable, and variables are searched.
        """
        if self._trace is not None and self._trace is not find_current_trace():
            raise RuntimeError(
                "A function given to `run` must not write a variable in a "
                "branch of `cond`, in the body of a loop, or in another "
                "function that JAX traces. Received: a write of "
                f"{update[0].path!r}. Return the new value from the branch or "
                "body, and assign it afterwards; call layers that write "
                "variables, such as Dropout, outside of it."
            )
        self.written.add(update[0])
        super().add_update(update)

    def get_loss_ids(self, layer: keras.Layer) -> set[int]:
        """Returns the set (not a copy) of the ids of a layer's losses."""
        if layer not in self._ids:
            self._ids[layer] = set()
        return self._ids[layer]

    def outputs(self) -> list[Any]:
        """Returns the losses, with None in place of other traces' losses."""
        return [
            None if loss in self._inner or loss in self._outer else loss
            for loss in self.losses
        ]

    def hand_out(self, outputs: list[Any]) -> None:
        """Passes the losses to the outer scope, once this scope has exited.

        Args:
          outputs: The losses that the method `outputs` returned, as values of
            the outer trace.
        """
        pairs = [
            # JAX cannot compute with a tracer of a trace that has ended.
            (loss, loss if output is None else output)
            for loss, output in zip(self.losses, outputs, strict=True)
        ]
        outer = self.original_scope
        if isinstance(outer, CollectingScope):
            # If the current trace is inside the outer scope's trace, `outputs`
            # are tracers that the outer scope's trace cannot return.
            is_within = get_opaque_trace_state() != outer._trace_state
            outer._inner.update(
                value
                for loss, value in pairs
                if loss in self._inner
                or (is_within and loss not in self._outer)
            )
            outer._replace_losses(self, [value for _, value in pairs])
        elif outer is None:
            for layer in self._ids:
                ids = self._ids[layer]
                layer._losses.extend(v for loss, v in pairs if id(loss) in ids)

    def _replace_losses(
        self, scope: "CollectingScope", values: list[Any]
    ) -> None:
        """Copies the losses of another scope, but with new values."""
        pairs = list(zip(scope.losses, values, strict=True))
        new = {id(loss): id(value) for loss, value in pairs}
        self.losses[:] = values
        self._ids = IdentityMap(
            (layer, {new[k] for k in scope._ids[layer] if k in new})
            for layer in scope._ids
        )


class LiftingScope(CollectingScope):
    """A stateless scope that records every variable that is read or written.

    It is meant for a trace that only infers shapes. A variable reads as zeros
    unless it was written in the scope, and variables that are created in the
    scope get their values when the scope exits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variables = IdentitySet()

    def enter_trace(self) -> None:
        """Makes the current trace the only one that may write variables."""
        self._trace = find_current_trace()

    def get_current_value(self, variable: keras.Variable) -> Array:
        """Returns the value that was last written in the scope, or zeros.

        Returns:
          An array with the variable's shape.
        """
        value = super().get_current_value(variable)
        if value is not None:
            return value
        self.variables.add(variable)
        # The zeros are not cached, because the trace that reads them may be
        # an inner trace that ends before the scope does.
        return jnp.zeros(variable.shape, variable.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Writes a variable, and records that it was written."""
        self.variables.add(update[0])
        super().add_update(update)


def _make_chained_getter(original: Callable[..., Any]) -> Callable[..., Any]:
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


_get_chained = _make_chained_getter(keras.StatelessScope.get_current_value)


class InnerScope(CollectingScope):
    """A stateless scope that reads variables it lacks from the outer scope.

    These are the variables that are not in its mapping. In Keras's
    `StatelessScope`, they would be read as if outside of any scope, and so
    their values would become constants of the trace.

    Args:
      mapping: Pairs of a variable and its value.

    Attributes:
      read: The variables that were read in the scope.
    """

    def __init__(self, mapping: Iterable[tuple[keras.Variable, Any]]) -> None:
        super().__init__(mapping, initialize_variables=False)
        self.read = IdentitySet()

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        """Returns a variable's value, and records that it was read."""
        self.read.add(variable)
        return _get_chained(self, variable)


def chain_scopes() -> contextlib.AbstractContextManager[None]:
    """Makes nested stateless scopes read from outer ones while the block runs.

    In the block, a loss that a layer adds belongs to the scope in which it was
    added.
    """
    return _patches.hold()


def _get_loss_ids(layer: keras.Layer) -> set[int]:
    scope = get_stateless_scope()
    if isinstance(scope, CollectingScope):
        return scope.get_loss_ids(layer)
    return vars(layer)["_loss_ids"]


def _set_loss_ids(layer: Any, ids: set[int]) -> None:
    vars(layer)["_loss_ids"] = ids


_patches = Patches(
    lambda: [
        (keras.StatelessScope, "get_current_value", _make_chained_getter),
        (
            keras.Layer,
            "_loss_ids",
            lambda _: property(_get_loss_ids, _set_loss_ids),
        ),
    ]
)
