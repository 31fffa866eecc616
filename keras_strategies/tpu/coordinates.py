"""Coordinates of TPU cores, read from JAX devices or from users' arguments."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Cell = tuple[int, ...]
"""A position in a grid: (x, y, z) for a chip, (x, y, z, core) for a core."""


def has_coordinates(device: jax.Device) -> bool:
    """Returns whether a device has a position in a TPU slice.

    GPUs have an attribute `coords` too, but it numbers hosts and their GPUs.
    """
    return (
        device.platform == "tpu" and getattr(device, "coords", None) is not None
    )


def get_chip(device: jax.Device) -> Cell:
    """Returns the position (x, y, z) of a TPU device's chip."""
    tpu: Any = device
    x, y, z = tpu.coords
    return int(x), int(y), int(z)


def get_core(device: jax.Device) -> int:
    """Returns the index of a TPU device's core in its chip."""
    return int(getattr(device, "core_on_chip", None) or 0)


def get_slice(device: jax.Device) -> int:
    """Returns the index of a TPU device's slice; 0 for any other device."""
    if device.platform != "tpu":
        return 0
    return int(getattr(device, "slice_index", None) or 0)


def compute_box(cells: Sequence[Cell]) -> tuple[Cell, Cell]:
    """Computes the smallest box that contains all given positions.

    Returns:
      The lowest corner of the box, and its size in each dimension.
    """
    dims = list(zip(*cells, strict=True))
    corner = tuple(min(dim) for dim in dims)
    shape = tuple(max(dim) - min(dim) + 1 for dim in dims)
    return corner, shape


def read_integers(name: str, value: object) -> IntArray:
    """Returns an argument as a new read-only array of integers.

    Raises:
      TypeError: if the argument is None.
      ValueError: if its rows have different lengths, or it contains anything
        but integers.
    """
    if value is None:
        raise TypeError(
            f"`{name}` must not be None. Received: None. Pass a sequence of "
            "integers."
        )
    try:
        array = np.asarray(value)
        # A number that is not a 32-bit integer changes when it is cast. The
        # check below detects this.
        with np.errstate(invalid="ignore"):
            integers = array.astype(np.int32)
        is_equal = array.dtype.kind in "iuf" and bool((array == integers).all())
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(_describe_fault(name, value)) from error
    if not is_equal and array.size:
        raise ValueError(_describe_fault(name, value))
    integers.flags.writeable = False
    return integers


def _describe_fault(name: str, value: object) -> str:
    text = repr(value)
    if len(text) > 200:
        text = f"{text[:200]}..."
    return (
        f"`{name}` must contain 32-bit integers, in rows of equal length. "
        f"Received: {text}. Pass nested sequences of integers or an integer "
        "array."
    )
