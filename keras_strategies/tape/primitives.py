"""The equations that tapes add to a trace. `expansion.py` removes them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from keras_strategies._types import Array, Equation

ON, OFF = "on", "off"
"""The ends of the names of the scopes in which a tape records, or does not."""

_NESTED = (
    "`GradientTape.gradient` must not be called in a function that JAX "
    "differentiates or maps (`jax.grad`, `jax.vmap`, `jax.linearize`). "
    "Use a nested tape, or "
    "`ks.value_and_grad`."
)
_UNTRACED = (
    "`GradientTape` must be used in a step of `fit`, `evaluate` or `predict` "
    "or in a function given to `run`, in the same trace as all that leads to "
    "its target. Elsewhere, use `ks.value_and_grad`."
)

read_p = Primitive("ks_tape_read")
"""The identity; its result is what one read of a variable returned."""

gradient_p = Primitive("ks_tape_gradient")
"""Gradients of targets. The operands are the targets, the gradients with
respect to the targets, and the sources."""
gradient_p.multiple_results = True


def read(value: Array) -> Any:
    """Returns a value as the result of an equation of its own."""
    return read_p.bind(value)


def differentiate(
    targets: Sequence[Array],
    seeds: Sequence[Array],
    sources: Sequence[Array],
    mark: str,
) -> list[Any]:
    """Returns the gradients of the sum of targets, one for each source.

    Args:
      targets: The targets.
      seeds: The gradients with respect to the targets.
      sources: The sources.
      mark: The mark of the tape; see `is_recorded`.
    """
    return gradient_p.bind(
        *targets, *seeds, *sources, num_targets=len(targets), mark=mark
    )


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
    sources = operands[2 * num_targets :]
    return [source.update(weak_type=False) for source in sources]


def _refuse_nested(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_NESTED)


def _refuse_untraced(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_UNTRACED)


def check_traced(is_traced: bool) -> None:
    """Raises RuntimeError if gradients are computed outside of a trace."""
    if not is_traced:
        _refuse_untraced()


read_p.def_impl(lambda value: value)
read_p.def_abstract_eval(lambda value: value)
ad.deflinear2(read_p, lambda cotangent, value: [cotangent])
batching.defvectorized(read_p)
mlir.register_lowering(read_p, lambda context, value: [value])

gradient_p.def_impl(_refuse_untraced)
gradient_p.def_abstract_eval(_infer_gradients)
ad.primitive_jvps[gradient_p] = _refuse_nested
batching.primitive_batchers[gradient_p] = _refuse_nested
mlir.register_lowering(gradient_p, _refuse_untraced)


@jax.custom_jvp
def add_tangent(value: Array, offset: Array) -> Array:
    """Returns a value, whose tangent is the sum of both tangents."""
    del offset
    return value


@add_tangent.defjvp
def _add_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The result has the tangents of outer derivatives, too.
    return add_tangent(*primals), tangents[0] + tangents[1]
