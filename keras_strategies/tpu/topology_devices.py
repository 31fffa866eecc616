"""Devices of TPU slices: by name, such as "v5e:4x4", and their coordinates."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from keras_strategies.gpu.targets import TARGETS

# More chips than any slice has. The number is limited because libtpu creates
# an object for each chip.
_MAX_CHIPS = 2**17
_NAME = re.compile(
    r"[A-Za-z0-9]+:(?P<shape>\d+(x\d+){1,2})(_twisted|_untwisted)?", re.ASCII
)
_IN_USE = "libtpu multi-process lockfile"
_EXAMPLES = (
    "'v5e:4x4', 'v5p:2x2x2', 'v6e:4x4' or 'tpu7x:2x2x1', or for GPUs "
    f"({', '.join(TARGETS)}) 'h100:8' or 'h100:8x8'"
)


def make_tpu_devices(
    name: str, *, num_slices: int = 1
) -> tuple[jax.Device, ...]:
    """Returns the devices of a slice such as "v5e:4x4", without a TPU.

    Programs can be compiled for these devices, but cannot run on them. This
    needs libtpu, which the extra `tpu` of this package installs.

    Args:
      name: The TPU's generation and the number of chips in each dimension,
        such as "v5e:4x4".
      num_slices: The number of such slices. Several slices are connected by
        the network of the data center.

    Raises: see `Topology.from_name`.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    sizes = match["shape"].split("x") if match else ["0"]
    if any(len(size) > 6 for size in sizes) or not (
        0 < math.prod(int(size) for size in sizes) * num_slices <= _MAX_CHIPS
    ):
        raise ValueError(
            _describe_problem(name, num_slices, "wrong format, or too large")
        )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            name, "tpu", num_slices=num_slices
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if _IN_USE in reason:
            raise RuntimeError(
                "libtpu, which compiles for TPUs, supports only one process at "
                f"a time on a machine. Received: name={name!r}, while another "
                "process uses it. Wait for that process, or set the "
                "environment variable ALLOW_MULTIPLE_LIBTPU_LOAD=1 on a "
                "machine without a TPU."
            ) from error
        raise ValueError(_describe_problem(name, num_slices, reason)) from error
    except RuntimeError as error:
        raise ImportError(
            "Creating a topology from a name needs libtpu, which JAX did not "
            f"find. Received: name={name!r}. Run `pip install 'jax[tpu]'`, "
            "which also works on a machine without a TPU."
        ) from error
    return tuple(described.devices)


def _describe_problem(name: object, num_slices: int, reason: str) -> str:
    slices = "" if num_slices == 1 else f", num_slices={num_slices}"
    return (
        "No such TPU slice exists to compile for. The name must be a TPU "
        "generation, a colon and the number of chips in each dimension, and "
        f"`num_slices` must be positive. Received: {name!r}{slices} "
        f"({reason}). Pass, for example, {_EXAMPLES}."
    )


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
        raise ValueError(_describe_integers(name, value)) from error
    if not is_equal and array.size:
        raise ValueError(_describe_integers(name, value))
    integers.flags.writeable = False
    return integers


def _describe_integers(name: str, value: object) -> str:
    text = repr(value)
    if len(text) > 200:
        text = f"{text[:200]}..."
    return (
        f"`{name}` must contain 32-bit integers, in rows of equal length. "
        f"Received: {text}. Pass nested sequences of integers or an integer "
        "array."
    )
