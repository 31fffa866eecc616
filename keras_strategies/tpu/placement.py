"""Placement of replicas on a TPU slice, each on a block of cores."""

import enum
import math
from collections.abc import Sequence

import numpy as np

from keras_strategies.tpu.topology import Topology
from keras_strategies.tpu.topology_devices import Cell, IntArray, read_integers


class DeviceOrderMode(enum.IntEnum):
    """The order in which replicas and their cores are placed on the chips.

    Differs from tf: every mode has the same effect. Replicas are placed in
    rows along x, and among a replica's cores, the index of the core in its
    chip varies fastest. A ring order is unnecessary, because XLA itself finds
    the links between chips, and compiles the same program for any order.

    Example:
      ```python
      topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
      assignment = ks.tpu.experimental.DeviceAssignment.build(
          topology,
          num_replicas=2,
          device_order_mode=ks.tpu.experimental.DeviceOrderMode.MESH,
      )
      ```
    """

    AUTO = 0
    RING = 1
    MESH = 2


def place_replicas(
    topology: Topology,
    computation_shape: object,
    computation_stride: object,
    num_replicas: object,
    device_order_mode: object,
) -> IntArray:
    """Returns the coordinates of each replica's cores.

    For the arguments and errors, see `DeviceAssignment.build`.

    Returns:
      An array of coordinates, of shape (replicas, cores, 4).
    """
    shape = _read_sizes("computation_shape", computation_shape)
    stride = _read_sizes("computation_stride", computation_stride)
    _check_mode(device_order_mode)
    count = _read_count(topology, shape, stride, num_replicas)
    if topology.missing_devices.size:
        return _place_in_task_order(topology, shape, stride, count)
    return _place_in_rows(topology, shape, stride, count)


def _read_sizes(name: str, value: object) -> Cell:
    if value is None:
        return (1, 1, 1, 1)
    sizes = read_integers(name, value)
    if sizes.shape != (4,) or (sizes < 1).any():
        raise ValueError(
            f"`{name}` must be four positive integers: x, y, z, core. "
            f"Received: {sizes.tolist()}."
        )
    return tuple(sizes.tolist())


def _check_mode(value: object) -> None:
    try:
        DeviceOrderMode(value)
    except ValueError as error:
        raise ValueError(
            "`device_order_mode` must be a DeviceOrderMode: AUTO, RING or "
            f"MESH. Received: {value!r}. Omit it for AUTO."
        ) from error


def _read_count(
    topology: Topology, shape: Cell, stride: Cell, value: object
) -> int:
    count = read_integers("num_replicas", value)
    if count.ndim or count < 1:
        raise ValueError(
            f"`num_replicas` must be a positive integer. Received: {value!r}."
        )
    mesh = topology.mesh_shape.tolist()
    maximum = math.prod(_count_replicas(mesh, shape, stride))
    if topology.missing_devices.size:
        present = topology.num_tasks * topology.num_tpus_per_task
        maximum = min(maximum, present // math.prod(shape))
    if count > maximum:
        raise ValueError(
            f"Only {maximum} replicas fit in the topology with this "
            "computation_shape and computation_stride. Received: "
            f"num_replicas={value}, computation_shape={list(shape)}, "
            f"computation_stride={list(stride)}, mesh_shape={mesh}, "
            f"{len(topology.missing_devices)} devices missing. Use fewer "
            "replicas, or fewer cores per replica."
        )
    return int(count)


def _count_replicas(
    mesh: Sequence[int], shape: Cell, stride: Cell
) -> list[int]:
    """Returns the number of replicas that fit in each dimension.

    With a stride, the cores of neighboring replicas are interleaved.
    """
    return [
        size // (cores * step) * step
        for size, cores, step in zip(mesh, shape, stride, strict=True)
    ]


def _place_in_rows(
    topology: Topology, shape: Cell, stride: Cell, count: int
) -> IntArray:
    mesh = topology.mesh_shape.tolist()
    grid = _choose_grid(_count_replicas(mesh, shape, stride), count)
    # Consecutive replicas differ first in the core, then in x, y and z.
    order = np.unravel_index(
        np.arange(count), (grid[2], grid[1], grid[0], grid[3])
    )
    z, y, x, core = order
    position = np.stack([x, y, z, core], axis=1)
    # In each dimension, `stride` neighboring replicas are interleaved in one
    # block of cores. The quotient is the index of the block, and the remainder
    # is the replica's offset in the block.
    outer, inner = position // stride, position % stride
    starts = outer * np.multiply(shape, stride) + inner
    cells = np.array(list(np.ndindex(shape))) * stride
    return (starts[:, None] + cells).astype(np.int32)


def _choose_grid(maximum: Sequence[int], count: int) -> list[int]:
    """Chooses the number of replicas in each dimension.

    The replicas form a grid that is as close to a cube as possible.
    The dimension in which the fewest replicas fit is filled first. Among equal
    dimensions, the core comes first, then x. So neighboring replicas are on
    the same chip if possible, and otherwise on the same host.

    Args:
      maximum: The number of replicas that fit in each dimension.
      count: The total number of replicas.
    """
    grid = [1] * len(maximum)
    last = len(maximum) - 1
    dims = sorted(
        range(len(maximum)), key=lambda d: (maximum[d], -1 if d == last else d)
    )
    for remaining, dim in zip(range(len(dims), 0, -1), dims, strict=True):
        grid[dim] = min(_ceil_root(count, remaining), maximum[dim])
        count = -(-count // grid[dim])
    return grid


def _ceil_root(value: int, degree: int) -> int:
    root = round(value ** (1 / degree))
    return root if root**degree >= value else root + 1


def _place_in_task_order(
    topology: Topology, shape: Cell, stride: Cell, count: int
) -> IntArray:
    if math.prod(stride) != 1:
        raise ValueError(
            "`computation_stride` must be 1 if devices are missing from the "
            "topology, because the other devices are then assigned to replicas "
            "in the order of the tasks. Received: computation_stride="
            f"{list(stride)}, {len(topology.missing_devices)} devices missing. "
            "Omit the stride."
        )
    places = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    size = math.prod(shape)
    return places[: count * size].reshape(count, size, topology.mesh_rank)
