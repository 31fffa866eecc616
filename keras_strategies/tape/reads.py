"""Reads of variables while tapes record.

Each is an equation of its own, in the trace in which its tapes record.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras
from jax._src import core
from jax.extend.core import Var

from keras_strategies.keras_bridge.patches import Patch, Patches
from keras_strategies.tape import primitives


class _Recording(threading.local):
    """The tapes that record in this thread, outermost first."""

    def __init__(self) -> None:
        self.tapes: list[Any] = []
        self.is_reading = False


recording = _Recording()


def find_trace() -> Any:
    """Returns the trace that records equations now, or None."""
    trace = core.trace_ctx.trace
    return trace if hasattr(trace, "frame") else None


def find_variables(arrays: Sequence[Any]) -> list[Any]:
    """Returns the variables of tracers in the jaxpr of their trace."""
    found = (getattr(array, "val", None) for array in arrays)
    return [v for v in found if isinstance(v, Var)]


def is_inexact(value: Any) -> bool:
    """Returns whether a value is an array that has derivatives."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _note_read(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_current_value(
        scope: keras.StatelessScope, variable: keras.Variable
    ) -> Any:
        if recording.is_reading or not recording.tapes:
            return original(scope, variable)
        # A scope may read the value from an outer one.
        recording.is_reading = True
        try:
            value = original(scope, variable)
        finally:
            recording.is_reading = False
        return _read(variable, value) if is_inexact(value) else value

    return get_current_value


def _read(variable: keras.Variable, value: Any) -> Any:
    """Returns the value of a variable as a source of the tapes that watch it.

    Tapes of the same trace share the equation.
    """
    tapes = [tape for tape in recording.tapes if tape.watches(variable)]
    current = find_trace()
    # A value of an inner trace is none of the tape's trace.
    is_inner = getattr(value, "_trace", None) is current
    for trace, trace_tapes in itertools.groupby(tapes, lambda tape: tape.trace):
        if trace is not None and (trace is current or not is_inner):
            with core.set_current_trace(trace):
                value = primitives.read(value)
            for tape in trace_tapes:
                tape.note_read(variable, value)
    return value


def _find_patches() -> Iterator[Patch]:
    """Yields the methods by which scopes return the values of variables."""
    classes: list[type] = [keras.StatelessScope]
    for cls in classes:
        classes += cls.__subclasses__()
        if "get_current_value" in vars(cls):
            yield cls, "get_current_value", _note_read


patches = Patches(_find_patches)
