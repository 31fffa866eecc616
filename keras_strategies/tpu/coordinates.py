"""Coordinates of TPU cores: of jax devices, and as users pass them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Cell = tuple[int, ...]
"""A place on a grid: (x, y, z) of a chip, (x, y, z, core) of a core."""


def has_coordinates(device: jax.Device) -> bool:
    """Whether a device knows its chip's place, as TPUs do."""
    return getattr(device, "coords", None) is not None


def chip_of(device: jax.Device) -> Cell:
    """Returns the (x, y, z) of a TPU's chip."""
    described: Any = device
    x, y, z = described.coords
    return int(x), int(y), int(z)


def core_of(device: jax.Device) -> int:
    """Returns which core of its chip a TPU is."""
    return int(getattr(device, "core_on_chip", None) or 0)


def slice_of(device: jax.Device) -> int:
    """Returns the slice of a device; slices are joined by the data centre."""
    return int(getattr(device, "slice_index", None) or 0)


def box_of(cells: Sequence[Cell]) -> tuple[Cell, Cell]:
    """Returns the lowest corner and the shape of the box around cells."""
    dims = list(zip(*cells, strict=True))
    corner = tuple(min(dim) for dim in dims)
    shape = tuple(max(dim) - min(dim) + 1 for dim in dims)
    return corner, shape


def read_integers(name: str, value: object) -> IntArray:
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


def _not_integers(name: str, value: object) -> str:
    shown = repr(value)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return (
        f"`{name}` holds whole numbers of 32 bits, in rows of equal length. "
        f"Received: {shown}. Pass a nest of integers or an integer array."
    )
