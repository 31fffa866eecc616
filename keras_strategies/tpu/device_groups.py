"""Devices of TPU slices: by name, in order, and in groups that shard variables.

The chips of a group form a box in the slice. A box consists of complete hosts,
so that XLA's collectives over the group use only links inside the box. Over
an entire large slice, XLA would replace the collectives by all-reduces of full
arrays, and for groups that are not boxes XLA cannot compile collectives.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from keras_strategies.gpu.topology_devices import TARGETS

IntArray = npt.NDArray[np.int32]
Cell = tuple[int, ...]
"""A position in a grid: (x, y, z) for a chip, (x, y, z, core) for a core."""

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

_MAX = 64
"""The maximum number of chips in a group whose size the user did not set."""

_TORUS = 64
"""The number of devices from which XLA replaces the gathers over an entire 3-D
slice by all-reduces of full arrays (v4:2x4x4, v4:4x4x4, v5p:4x4x4 with libtpu
0.0.42; neither v4:2x2x4 nor v5p:2x4x4)."""


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
      ValueError: if its rows have different lengths, or it contains anything
        but 32-bit integers.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # Rows have different lengths.
        array = np.asarray(None)
    is_integer = array.dtype.kind in "iu" or not array.size
    integers = array.astype(np.int32) if is_integer else np.zeros(0, np.int32)
    if not is_integer or (integers != array).any():
        raise ValueError(
            f"`{name}` must contain 32-bit integers, in rows of equal length. "
            f"Received: {value!r:.200}. Pass nested sequences of integers or "
            "an integer array."
        )
    integers.flags.writeable = False
    return integers


def default_device_order(
    devices: Iterable[jax.Device],
) -> tuple[jax.Device, ...]:
    """Returns devices ordered by slice, and within a slice by process.

    In a batch that is split over the devices in this order, the rows of each
    process are contiguous. Devices without coordinates (CPUs, GPUs) keep their
    order.

    Args:
      devices: Unique devices of one platform, with the same number of devices
        from each slice.

    Raises:
      ValueError: if the slices have different numbers of devices.
    """
    devices = tuple(devices)
    if not all(map(has_coordinates, devices)):
        return devices
    sizes = Counter(map(get_slice, devices))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "All slices must have the same number of devices. Received: "
            f"{dict(sizes)} devices, by slice. Pass the same number of devices "
            "from each slice."
        )
    return tuple(sorted(devices, key=lambda d: (get_slice(d), d.process_index)))


def group_replicas(
    replicas: np.ndarray, shards: int | None
) -> tuple[np.ndarray, int | None]:
    """Returns a slice's replicas ordered by group, and the size of a group.

    Variables can be sharded over the replicas of a group.

    Args:
      replicas: The replicas' devices, as an array of shape (replicas, cores).
      shards: The number of replicas in each group. None: the slice is a group,
        but a slice with more than 64 chips is split into the largest boxes
        with at most 64 chips, and a 3-D slice with at least 64 devices into
        several boxes.

    Returns:
      The replicas, and the number of replicas in each group. For devices
      without coordinates (CPUs, GPUs), this number is the argument `shards`.

    Raises:
      ValueError: if no boxes with this number of replicas fill the slice.
    """
    if not all(map(has_coordinates, replicas.flat)):
        return replicas, shards
    size, cores = replicas.shape
    if shards is not None and shards % size == 0:
        return replicas, shards
    origin, sides = compute_box([get_chip(device) for device in replicas.flat])
    # Maps each number of replicas to the best box with this number, which is
    # the last one that `_iter_boxes` yields.
    boxes = {
        count // cores: box
        for count, box in _iter_boxes(list(replicas.flat))
        if all(_is_in_one(replica, origin, box) for replica in replicas)
    }
    per_chip = replicas.size // len(set(map(get_chip, replicas.flat)))
    maximum = _MAX * per_chip
    if min(sides) > 1 and _TORUS <= replicas.size <= maximum:
        maximum = replicas.size - 1
    fit = [n for n in boxes if n * cores <= maximum]
    count = max(fit, default=size) if shards is None else shards
    if count == size:
        return replicas, count
    if count not in boxes:
        raise ValueError(
            "On TPUs, a group of replicas that shards variables must fill a "
            "box of complete hosts, with all cores of its replicas. "
            f"Received: shards={count} in slices with "
            f"{size} replicas. Choose one of {sorted(boxes)}, or None."
        )
    places = [
        _find_box(replica[0], origin, boxes[count]) for replica in replicas
    ]
    return replicas[sorted(range(size), key=places.__getitem__)], count


def _iter_boxes(devices: Sequence[jax.Device]) -> Iterator[tuple[int, Cell]]:
    """Yields the shapes of boxes that tile a slice, with their device counts.

    Boxes that span the slice in more dimensions come later. They are better,
    because in these dimensions their chips are linked in rings.
    """
    chips = {get_chip(device) for device in devices}
    cores = len(devices) // len(chips)
    _, slice_shape = compute_box(sorted(chips))
    if math.prod(slice_shape) != len(chips):
        return
    hosts: dict[int, set[Cell]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, set()).add(get_chip(device))
    sizes = [compute_box(sorted(cells))[1] for cells in hosts.values()]
    host_shape = np.max(sizes, axis=0).tolist()
    # In each dimension, the size of a box must divide the slice's size and be
    # a multiple of a host's size.
    sides = [
        [n for n in range(1, size + 1) if size % n == 0 and n % step == 0]
        for size, step in zip(slice_shape, host_shape, strict=True)
    ]
    boxes = sorted(
        itertools.product(*sides),
        key=lambda box: (
            sum(a == b for a, b in zip(box, slice_shape, strict=True)),
            -max(box),
        ),
    )
    for box in boxes:
        yield math.prod(box) * cores, box


def _is_in_one(replica: np.ndarray, origin: Cell, box: Cell) -> bool:
    """Returns whether all cores of a replica are in the same box."""
    return len({_find_box(device, origin, box) for device in replica}) == 1


def _find_box(device: jax.Device, origin: Cell, box: Cell) -> Cell:
    """Returns the position of the box that contains a device.

    The position counts boxes, not chips. For example, it is (1, 0, 0) for the
    second box along x.
    """
    return tuple(
        (at - start) // side
        for at, start, side in zip(get_chip(device), origin, box, strict=True)
    )
