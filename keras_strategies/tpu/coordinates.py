"""Coordinates of jax devices: chip, core, slice."""

from collections.abc import Sequence
from typing import Any

import jax

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
