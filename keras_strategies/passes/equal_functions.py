"""Tests whether functions compute the same."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn

from keras_strategies._types import Array
from keras_strategies.passes.stages import (
    compute_equations,
    shape_of,
    variables,
)
from keras_strategies.passes.value_numbers import ValueNumbers


def compute_same(traces: Iterable[ClosedJaxpr]) -> bool:
    """Returns whether traced functions compute the same results and gradients.

    Their operations and constants are compared. These determine the gradients,
    except where a function defines a derivative of its own (`jax.custom_vjp`);
    such derivatives are traced and compared, too. Values of an outer trace that
    the functions read must be the same objects.

    Args:
      traces: The traces of the functions for the same arguments. Those after
        the first that differs are not read.

    Raises:
      Exception: if a derivative of a function's own cannot be traced.
    """
    # Constants by their contents: equal ones are represented by one of them.
    known: dict[Any, Any] = {}

    def with_known(traced: ClosedJaxpr) -> ClosedJaxpr:
        consts = [known.setdefault(_key_of(c), c) for c in traced.consts]
        return traced.replace(consts=consts)

    numbers = ValueNumbers(
        lambda jaxpr, equation: with_known(_trace_rule(jaxpr, equation))
    )
    first: list[int] = []
    for traced in traces:
        found = numbers.number_outputs(with_known(traced))
        first = first or found
        if found != first:
            return False
    return True


def _trace_rule(jaxpr: Jaxpr, equation: JaxprEqn) -> ClosedJaxpr:
    """Traces one equation of a jaxpr together with its backward pass."""
    read = list(dict.fromkeys(variables(equation.invars)))
    written = [v for v in equation.outvars if not isinstance(v, DropVar)]

    def compute_both(*values: Array) -> Any:
        floats, others = _split(values)

        def forward(floats: list[Any]) -> tuple[list[Any], list[Any]]:
            of = dict(zip(read, _join(values, floats, others), strict=True))
            return _split(
                compute_equations(jaxpr, [equation], written, of.__getitem__)
            )

        results, pull_back, rest = jax.vjp(forward, floats, has_aux=True)
        return results, rest, pull_back(results)

    return jax.make_jaxpr(compute_both)(*(shape_of(v.aval) for v in read))


def _is_float(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _split(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Divides arrays into those of a float dtype and the others."""
    floats = [a for a in arrays if _is_float(a)]
    return floats, [a for a in arrays if not _is_float(a)]


def _join(
    like: Sequence[Any], floats: list[Any], others: list[Any]
) -> list[Any]:
    """Inverts `_split`, for arrays with the dtypes of `like`."""
    of_floats, of_others = iter(floats), iter(others)
    return [next(of_floats if _is_float(a) else of_others) for a in like]


def _key_of(const: Any) -> Any:
    """Returns a key that is equal for constants that are equal bit for bit."""
    if isinstance(const, Tracer):
        return id(const)
    array = np.asarray(const)
    return array.shape, array.dtype, array.tobytes()
