"""Tests whether functions compute the same."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from keras_strategies._core.jaxprs.stages import shape_of
from keras_strategies._core.jaxprs.value_numbers import ValueNumbers
from keras_strategies._types import Array


def compute_same(functions: Sequence[Callable[..., Any]], *args: Any) -> bool:
    """Returns whether functions compute the same results and gradients.

    The functions are traced with the shapes of the same arguments, and their
    operations and constants are compared. Values of an outer trace that the
    functions read must be the same objects.

    Args:
      functions: The functions. They return nests of arrays.
      *args: Their arguments: nests of arrays.

    Raises:
      Exception: if a function cannot be traced or differentiated.
    """
    numbers = ValueNumbers(ignores_rules=True)
    # Constants by their contents: equal ones are represented by one of them.
    known: dict[Any, Any] = {}
    first: list[int] = []
    for fn in functions:
        traced = _trace(fn, args)
        consts = [known.setdefault(_key_of(c), c) for c in traced.consts]
        found = numbers.number_outputs(traced.replace(consts=consts))
        first = first or found
        if found != first:
            return False
    return True


def _trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> ClosedJaxpr:
    """Traces a function together with its backward pass."""
    leaves, structure = jax.tree.flatten(args)

    def compute_both(*leaves: Array) -> Any:
        floats, others = _split(leaves)

        def forward(floats: list[Any]) -> tuple[list[Any], list[Any]]:
            given = _join(leaves, floats, others)
            return _split(jax.tree.leaves(fn(*structure.unflatten(given))))

        results, pull_back, rest = jax.vjp(forward, floats, has_aux=True)
        return results, rest, pull_back(results)

    return jax.make_jaxpr(compute_both)(*map(shape_of, leaves))


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
