"""Dtypes and shapes of arrays, as a file or another process names them."""

import math
import re
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import numpy as np


_MAX_DTYPE = 64
# Of one entry, as a dtype of texts may be of any length.
_MAX_BYTES = 1 << 20
_MAX_RANK = 31
_MAX_ENTRIES = 2.0**48
# None of those that numpy reads as a list of dtypes, for which it compiles
# what is in parentheses.
_DTYPE = re.compile(r"[<>|=]?[A-Za-z][A-Za-z0-9_]*(\[[A-Za-z0-9]+\])?", re.A)


def is_dtype_name(name: object) -> TypeGuard[str]:
    """Whether something may be what `str` of a dtype wrote. Imports nothing."""
    return (
        isinstance(name, str)
        and len(name) <= _MAX_DTYPE
        and _DTYPE.fullmatch(name) is not None
    )


def dtype_named(name: object) -> "np.dtype | None":
    """The dtype that `str` wrote; None of anything else."""
    # Here, so that who looks at names alone needs no JAX.
    import jax

    if not is_dtype_name(name):
        return None
    try:
        dtype = jax.numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None
    # One way to write each, and no compound ones.
    is_so = str(dtype) == name and not dtype.fields and not dtype.subdtype
    return dtype if is_so and dtype.itemsize <= _MAX_BYTES else None


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Whether something is the shape of an array that may be somewhere."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_RANK
        and all(
            type(size) is int and 0 <= size <= _MAX_ENTRIES for size in value
        )
        and math.prod(map(float, value)) <= _MAX_ENTRIES
    )
