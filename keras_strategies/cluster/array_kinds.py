"""Checks of dtypes and shapes that came from a file or another process."""

import math
import re
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import numpy as np


_MAX_DTYPE = 64
# The maximum size of one array element, in bytes. A string dtype, which may
# have any length, can exceed it.
_MAX_BYTES = 1 << 20
_MAX_RANK = 31
_MAX_ENTRIES = 2.0**48
# The pattern excludes lists of dtypes such as "f4, (2,)f8", because NumPy would
# evaluate the expression in parentheses.
_DTYPE = re.compile(r"[<>|=]?[A-Za-z][A-Za-z0-9_]*(\[[A-Za-z0-9]+\])?", re.A)


def is_dtype_name(name: object) -> TypeGuard[str]:
    """Returns whether `name` looks like the result of `str(dtype)`.

    The function needs neither NumPy nor JAX.
    """
    return (
        isinstance(name, str)
        and len(name) <= _MAX_DTYPE
        and _DTYPE.fullmatch(name) is not None
    )


def parse_dtype(name: object) -> "np.dtype | None":
    """Returns the dtype whose `str` is `name`, or None if no dtype matches."""
    # Imported here, so that callers which only check names need no JAX.
    import jax

    if not is_dtype_name(name):
        return None
    try:
        dtype = jax.numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    # Accepts only the canonical name of each dtype, and no compound dtypes.
    is_canonical = str(dtype) == name
    is_simple = is_canonical and not dtype.fields and not dtype.subdtype
    return dtype if is_simple and dtype.itemsize <= _MAX_BYTES else None


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Returns whether `value` is the shape of an array that could exist.

    Shapes with too many dimensions or entries are rejected.
    """
    return (
        isinstance(value, list)
        and len(value) <= _MAX_RANK
        and all(
            type(size) is int and 0 <= size <= _MAX_ENTRIES for size in value
        )
        and math.prod(map(float, value)) <= _MAX_ENTRIES
    )
