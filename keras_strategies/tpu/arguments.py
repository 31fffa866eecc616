"""Integers as users pass them: sequences, nests, numpy arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


def read_integers(name: str, value: Any) -> IntArray:
    """Returns an argument as a read-only array of integers of our own.

    Raises:
      TypeError: it is None.
      ValueError: it is ragged, or holds anything but whole numbers.
    """
    if value is None:
        raise TypeError(
            f"`{name}` is needed. Received: None. Pass a sequence of integers."
        )
    try:
        given = np.asarray(value)
        # A wrong number is found below, by what became of it.
        with np.errstate(invalid="ignore"):
            integers = given.astype(np.int32)
        is_whole = given.dtype.kind in "iuf" and bool((given == integers).all())
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(_not_integers(name, value)) from error
    if not is_whole and given.size:
        raise ValueError(_not_integers(name, value))
    integers.flags.writeable = False
    return integers


def _not_integers(name: str, value: Any) -> str:
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return (
        f"`{name}` holds whole numbers of 32 bits, in rows of equal length. "
        f"Received: {shown}. Pass a nest of integers or an integer array."
    )
