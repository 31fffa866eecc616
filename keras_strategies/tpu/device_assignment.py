"""DeviceAssignment: which cores of a TPU slice each replica uses."""

import enum
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keras_strategies.tpu.device_groups import Cell, IntArray, read_integers
from keras_strategies.tpu.topology import Topology

SINGLE_CORE_ASSIGNMENT = [[[0, 0, 0, 0]]]
"""The coordinates of an assignment with one replica on the first core."""


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


class DeviceAssignment:
    """An assignment of a TPU slice's cores to replicas.

    `DeviceAssignment.build` creates an assignment in which all replicas have
    blocks of cores with the same shape.

    Args:
      topology: The slice's topology.
      core_assignment: The coordinates (x, y, z, core) of each replica's cores,
        as an array of shape (replicas, cores, 4).

    Raises:
      ValueError: if the array has a wrong shape, or a core has no device or is
        used twice.
      IndexError: if a core is outside the topology.

    Example:
      ```python
      topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
      assignment = ks.tpu.experimental.DeviceAssignment.build(
          topology, computation_shape=[2, 1, 1, 1], num_replicas=4
      )
      ```
    """

    def __init__(
        self, topology: Topology, core_assignment: npt.ArrayLike
    ) -> None:
        self._topology = topology
        self._core_assignment = _check_cores(topology, core_assignment)
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, cores in enumerate(self._core_assignment):
            for logical_core, place in enumerate(cores):
                task = topology.task_ordinal_at_coordinates(place)
                self._replicas.setdefault((task, logical_core), []).append(
                    replica
                )

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: npt.ArrayLike | None = None,
        computation_stride: npt.ArrayLike | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Creates an assignment with blocks of cores of the same shape.

        Args:
          topology: The slice's topology, or the bytes of its `serialized()`.
          computation_shape: The number of cores of a replica in each dimension
            (x, y, z, core); by default, a replica has one core.
          computation_stride: The distance between a replica's cores in each
            dimension; by default 1.
          num_replicas: The number of replicas.
          device_order_mode: Accepted for compatibility with TensorFlow, but
            has no effect: replicas are always placed in rows along x, because
            XLA's programs are the same for any order.

        Raises:
          ValueError: if the replicas do not fit, need a core whose device is
            missing from the topology, or an argument is invalid.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        shape = _read_sizes("computation_shape", computation_shape)
        stride = _read_sizes("computation_stride", computation_stride)
        del device_order_mode
        count = _read_count(topology, shape, stride, num_replicas)
        return cls(topology, _place_in_rows(topology, shape, stride, count))

    @property
    def topology(self) -> Topology:
        """The slice's topology."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """The number of cores of each replica."""
        return self._core_assignment.shape[1]

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def core_assignment(self) -> IntArray:
        """The coordinates of every core, of shape (replicas, cores, 4)."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> Cell:
        """Returns the coordinates (x, y, z, core) of a core of a replica.

        Raises:
          IndexError: if the replica or the core does not exist. Negative
            numbers count from the end, as in tf.
        """
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose core `logical_core` is in a given task.

        Raises:
          ValueError: if no such replicas exist.
        """
        replicas = self._replicas.get((task_id, logical_core))
        if replicas is None:
            raise ValueError(
                "No replica has this core in this task. Received: task_id="
                f"{task_id} and logical_core={logical_core}, in an assignment "
                f"with {self._topology.num_tasks} tasks and "
                f"{self.num_cores_per_replica} cores per replica."
            )
        return list(replicas)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the index of a core's device among its task's devices."""
        return self._topology.tpu_device_ordinal_at_coordinates(
            self.coordinates(replica, logical_core)
        )

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns the TensorFlow device name of the host of a core."""
        return self._topology.cpu_device_name_at_coordinates(
            self.coordinates(replica, logical_core), job=job
        )

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns the TensorFlow device name of a core."""
        return self._topology.tpu_device_name_at_coordinates(
            self.coordinates(replica, logical_core), job=job
        )

    def __repr__(self) -> str:
        return (
            f"<DeviceAssignment num_replicas={self.num_replicas} "
            f"num_cores_per_replica={self.num_cores_per_replica} "
            f"topology={self._topology!r}>"
        )


def replica_mesh_devices(
    assignment: DeviceAssignment,
) -> npt.NDArray[np.object_]:
    """Returns the JAX device of each core in an assignment.

    Args:
      assignment: An assignment whose topology was made from devices.

    Returns:
      An array of devices, of shape (num_replicas, num_cores_per_replica).

    Raises:
      ValueError: if the topology was not made from devices.
    """
    shape = (assignment.num_replicas, assignment.num_cores_per_replica)
    devices = np.empty(shape, dtype=object)
    for replica, core in np.ndindex(shape):
        place = assignment.coordinates(replica, core)
        devices[replica, core] = assignment.topology.device_at_coordinates(
            place
        )
    return devices


def _check_cores(topology: Topology, value: object) -> IntArray:
    cores = read_integers("core_assignment", value)
    is_valid = cores.ndim == 3 and cores.shape[2] == topology.mesh_rank
    if not is_valid or not cores.size:
        raise ValueError(
            "`core_assignment` must have the shape (replicas, cores, 4), with "
            f"at least one core. Received: the shape {cores.shape}."
        )
    cells = cores.reshape(-1, topology.mesh_rank)
    if len(np.unique(cells, axis=0)) < len(cells):
        raise ValueError(
            "Each core may be used only once. Received: core_assignment="
            f"{cores.tolist()!r:.200}."
        )
    return cores


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
    if count > maximum:
        raise ValueError(
            f"Only {maximum} replicas fit in the topology with this "
            "computation_shape and computation_stride. Received: "
            f"num_replicas={value}, computation_shape={list(shape)}, "
            f"computation_stride={list(stride)}, mesh_shape={mesh}. Use fewer "
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
