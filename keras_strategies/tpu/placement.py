"""The placement of equal blocks of cores, one a replica, on a TPU slice."""

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategies.tpu.arguments import IntArray, read_integers
from keras_strategies.tpu.rings import Cell, ring_of_grid
from keras_strategies.tpu.topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """In which order replicas and their cores lie on the chips."""

    AUTO = 0
    """Rings where the replicas fill the slice, else rows."""
    RING = 1
    """Rings: neighbours are one hop apart, the last and the first too."""
    MESH = 2
    """Rows: x first for replicas, the core first for a replica's cores."""


def place_replicas(
    topology: Topology,
    computation_shape: Any,
    computation_stride: Any,
    num_replicas: Any,
    device_order_mode: Any,
) -> IntArray:
    """Returns the cores of replicas, of shape (replicas, cores, 4).

    For the arguments and errors see `DeviceAssignment.build`.
    """
    shape = _read_sizes("computation_shape", computation_shape)
    stride = _read_sizes("computation_stride", computation_stride)
    mode = _read_mode(device_order_mode)
    count = _read_count(topology, shape, stride, num_replicas)
    if topology.missing_devices.size:
        return _in_task_order(topology, shape, stride, count, mode)
    if _are_rings(topology, shape, stride, count, mode):
        return _in_rings(topology, shape)
    return _in_rows(topology, shape, stride, count)


def _read_sizes(name: str, value: Any) -> Cell:
    if value is None:
        return (1, 1, 1, 1)
    sizes = read_integers(name, value)
    if sizes.shape != (4,) or (sizes < 1).any():
        raise ValueError(
            f"`{name}` is four positive integers: x, y, z, core. Received: "
            f"{sizes.tolist()}."
        )
    return tuple(sizes.tolist())


def _read_mode(value: Any) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(value)
    except ValueError as error:
        raise ValueError(
            "`device_order_mode` is a DeviceOrderMode: AUTO, RING or MESH. "
            f"Received: {value!r}."
        ) from error


def _read_count(
    topology: Topology, shape: Cell, stride: Cell, value: Any
) -> int:
    count = read_integers("num_replicas", value)
    if count.ndim or count < 1:
        raise ValueError(
            f"`num_replicas` is a positive integer. Received: {value!r}."
        )
    mesh = topology.mesh_shape.tolist()
    most = math.prod(_replicas_in_each_dim(mesh, shape, stride))
    if topology.missing_devices.size:
        present = topology.num_tasks * topology.num_tpus_per_task
        most = min(most, present // math.prod(shape))
    if count > most:
        raise ValueError(
            f"Only {most} replicas fit in the topology, with a "
            "computation_shape times computation_stride in it each. Received: "
            f"num_replicas={value}, computation_shape={list(shape)}, "
            f"computation_stride={list(stride)}, mesh_shape={mesh}, "
            f"{len(topology.missing_devices)} devices missing. Use fewer "
            "replicas, or fewer cores for each."
        )
    return int(count)


def _replicas_in_each_dim(
    mesh: Sequence[int], shape: Cell, stride: Cell
) -> list[int]:
    """With strides, replicas lie between each other's cores."""
    return [
        size // (cores * step) * step
        for size, cores, step in zip(mesh, shape, stride, strict=True)
    ]


def _are_rings(
    topology: Topology,
    shape: Cell,
    stride: Cell,
    count: int,
    mode: DeviceOrderMode,
) -> bool:
    mesh = topology.mesh_shape.tolist()
    are_possible = (
        shape[-1] == mesh[-1]
        and math.prod(stride) == 1
        and count == math.prod(_replicas_in_each_dim(mesh, shape, stride))
    )
    if mode is DeviceOrderMode.RING and not are_possible:
        raise ValueError(
            "Rings need replicas of whole chips, without strides, as many as "
            f"fit. Received: device_order_mode=RING, num_replicas={count}, "
            f"computation_shape={list(shape)}, computation_stride="
            f"{list(stride)}, mesh_shape={mesh}. Use DeviceOrderMode.AUTO."
        )
    return are_possible and mode is not DeviceOrderMode.MESH


def _in_rings(topology: Topology, shape: Cell) -> IntArray:
    """A ring of replicas, and in each a ring of its chips."""
    blocks = topology.mesh_shape // shape
    corners = np.array(ring_of_grid(blocks[:3].tolist()), dtype=np.int32)
    chips = np.array(ring_of_grid(shape[:3]), dtype=np.int32)
    places = (corners * shape[:3])[:, None] + chips
    num_cores = shape[3]
    places = np.repeat(places, num_cores, axis=1)
    core = np.tile(np.arange(num_cores, dtype=np.int32), len(chips))
    core = np.broadcast_to(core, places.shape[:2])
    return np.concatenate([places, core[..., None]], axis=2)


def _in_rows(
    topology: Topology, shape: Cell, stride: Cell, count: int
) -> IntArray:
    mesh = topology.mesh_shape.tolist()
    grid = _choose_grid(_replicas_in_each_dim(mesh, shape, stride), count)
    # The core number runs fastest, then x, y and z.
    order = np.unravel_index(
        np.arange(count), (grid[2], grid[1], grid[0], grid[3])
    )
    z, y, x, core = order
    position = np.stack([x, y, z, core], axis=1)
    outer, inner = position // stride, position % stride
    starts = outer * np.multiply(shape, stride) + inner
    cells = np.array(list(np.ndindex(shape))) * stride
    return (starts[:, None] + cells).astype(np.int32)


def _choose_grid(most: Sequence[int], count: int) -> list[int]:
    """The replicas in each dimension: as near to a cube as they fit.

    The narrowest dimension is chosen first, and of equal ones the core
    number, then x: replicas are near each other on a chip, then on a host.
    """
    grid = [1] * len(most)
    last = len(most) - 1
    dims = sorted(
        range(len(most)), key=lambda d: (most[d], -1 if d == last else d)
    )
    for remaining, dim in zip(range(len(dims), 0, -1), dims, strict=True):
        grid[dim] = min(_ceil_of_root(count, remaining), most[dim])
        count = -(-count // grid[dim])
    return grid


def _ceil_of_root(value: int, degree: int) -> int:
    root = round(value ** (1 / degree))
    return root if root**degree >= value else root + 1


def _in_task_order(
    topology: Topology,
    shape: Cell,
    stride: Cell,
    count: int,
    mode: DeviceOrderMode,
) -> IntArray:
    if math.prod(stride) != 1 or mode is DeviceOrderMode.RING:
        raise ValueError(
            "Where devices are missing, replicas take those that are left in "
            "the order of the tasks: no strides and no rings. Received: "
            f"computation_stride={list(stride)}, device_order_mode="
            f"{mode.name}, {len(topology.missing_devices)} devices missing. "
            "Leave both out."
        )
    places = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    size = math.prod(shape)
    return places[: count * size].reshape(count, size, topology.mesh_rank)
