"""The equations that tapes add to a trace: reads of variables, and gradients.

`expansion.py` removes them.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax._src import core, source_info_util
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir

from keras_strategies._types import Array, Equation
from keras_strategies.keras_bridge.patches import Patch, Patches
from keras_strategies.passes.row_kinds.marks import make_identity
from keras_strategies.spmd.identity import temporary_attribute

ON, OFF = "on", "off"
"""The ends of the names of the scopes in which a tape records, or does not."""

_NESTED = (
    "`GradientTape.gradient` must not be called in a function that JAX "
    "differentiates or maps (`jax.grad`, `jax.vmap`, `jax.linearize`). "
    "Use a nested tape, or `ks.value_and_grad`."
)
_UNTRACED = (
    "`GradientTape` must be used in a step of `fit`, `evaluate` or `predict` "
    "or in a function given to `run`, in the same trace as all that leads to "
    "its target. Elsewhere, use `ks.value_and_grad`."
)

read_p = make_identity("ks_tape_read")
"""The identity; its result is what one read of a variable returned."""

gradient_p = Primitive("ks_tape_gradient")
"""Gradients of the sum of targets, one for each source.

The operands are the targets, the gradients with respect to the targets, and the
sources. The parameters are the number of targets, and the tape's mark; see
`is_recorded`.
"""
gradient_p.multiple_results = True


def split_operands(
    equation: Equation,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the targets, the gradients with respect to them, the sources."""
    count, operands = equation.params["num_targets"], list(equation.invars)
    return operands[:count], operands[count : 2 * count], operands[2 * count :]


def is_recorded(equation: Equation, mark: str) -> bool:
    """Returns whether a tape recorded an equation.

    Args:
      equation: The equation.
      mark: The tape's mark. The equations that it records are computed in a
        named scope whose name is the mark and `ON`, and not in one within it
        whose name is the mark and `OFF`.
    """
    names = str(equation.source_info.name_stack)
    return names.rfind(mark + ON) > names.rfind(mark + OFF)


def _infer_gradients(*operands: Any, num_targets: int, mark: str) -> list[Any]:
    return [x.update(weak_type=False) for x in operands[2 * num_targets :]]


def _refuse_nested(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_NESTED)


def refuse_untraced(*_: Any, **__: Any) -> Any:
    """Raises RuntimeError: a tape is used outside of a trace."""
    raise RuntimeError(_UNTRACED)


ad.deflinear2(read_p, lambda cotangent, value: [cotangent])

gradient_p.def_impl(refuse_untraced)
gradient_p.def_abstract_eval(_infer_gradients)
ad.primitive_jvps[gradient_p] = _refuse_nested
batching.primitive_batchers[gradient_p] = _refuse_nested
mlir.register_lowering(gradient_p, refuse_untraced)


@jax.custom_jvp
def add_tangent(value: Array, offset: Array) -> Array:
    """Returns a value, whose tangent is the sum of both tangents."""
    del offset
    return value


@add_tangent.defjvp
def _add_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The result has the tangents of outer derivatives, too.
    return add_tangent(*primals), tangents[0] + tangents[1]


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


def find_names() -> str:
    """Returns the names of the scopes in which equations are computed now."""
    return str(source_info_util.current_name_stack())


def find_variable(array: Any) -> Var | None:
    """Returns the variable of a tracer in the jaxpr of its trace, or None."""
    found = getattr(array, "val", None)
    return found if isinstance(found, Var) else None


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
        with temporary_attribute(recording, "is_reading", True):
            value = original(scope, variable)
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
                value = read_p.bind(value)
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
