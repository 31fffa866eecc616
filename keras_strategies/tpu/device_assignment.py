"""DeviceAssignment: which cores of a TPU slice form which replica."""

import numpy as np
import numpy.typing as npt

from keras_strategies.tpu.coordinates import Cell, IntArray, read_integers
from keras_strategies.tpu.placement import DeviceOrderMode, place_replicas
from keras_strategies.tpu.topology import Topology

SINGLE_CORE_ASSIGNMENT = [[[0, 0, 0, 0]]]
"""One replica on the first core."""


class DeviceAssignment:
    """The cores of each replica, as coordinates in a topology.

    `DeviceAssignment.build` makes one from the shape of a replica.

    Args:
      topology: The slice.
      core_assignment: Coordinates, of shape (replicas, cores, 4).

    Raises:
      ValueError: not a topology; a wrong shape; a core outside the topology,
        missing in it, or used twice.

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
        self._topology = _check_topology(topology)
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
        """Returns an assignment of equal blocks of cores, one a replica.

        Args:
          topology: The slice, or what its `serialized()` returned.
          computation_shape: A replica's cores in each dimension,
            (x, y, z, core); one core if left out.
          computation_stride: The distance of a replica's cores in each
            dimension; 1 if left out.
          num_replicas: The number of replicas.
          device_order_mode: Accepted for tf's signature. Every mode gives
            rows, x first: XLA's programs are the same for any order.

        Where the topology misses devices, replicas take cores in the order of
        the tasks, and a stride is refused.

        Raises:
          ValueError: the replicas do not fit, or are not possible so.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        topology = _check_topology(topology)
        cores = place_replicas(
            topology,
            computation_shape,
            computation_stride,
            num_replicas,
            device_order_mode,
        )
        return cls(topology, cores)

    @property
    def topology(self) -> Topology:
        """The slice."""
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
        """Coordinates of every core, of shape (replicas, cores, 4)."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> Cell:
        """Returns the (x, y, z, core) of a replica's core.

        Raises:
          IndexError: no such replica or core.
        """
        counts = self._core_assignment.shape[:2]
        if not (0 <= replica < counts[0] and 0 <= logical_core < counts[1]):
            raise IndexError(
                "A core is one of a replica of the assignment. Received: "
                f"replica={replica} of {counts[0]}, logical_core="
                f"{logical_core} of {counts[1]}."
            )
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose core of that number is in a task.

        Raises:
          ValueError: there is none.
        """
        found = self._replicas.get((task_id, logical_core))
        if found is None:
            raise ValueError(
                "No replica has that core in that task. Received: task_id="
                f"{task_id} of {self._topology.num_tasks}, logical_core="
                f"{logical_core} of {self.num_cores_per_replica}."
            )
        return list(found)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a core's device in its task."""
        return self._topology.tpu_device_ordinal_at_coordinates(
            self.coordinates(replica, logical_core)
        )

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns tf's name of the host of a core."""
        return self._topology.cpu_device_name_at_coordinates(
            self.coordinates(replica, logical_core), job=job
        )

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns tf's name of a core's device."""
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
    """Returns the jax devices of an assignment, for a mesh of two axes.

    Args:
      assignment: One whose topology was made from devices.

    Returns:
      Devices, of shape (num_replicas, num_cores_per_replica).

    Raises:
      ValueError: the topology knows no devices.
    """
    shape = (assignment.num_replicas, assignment.num_cores_per_replica)
    devices = np.empty(shape, dtype=object)
    for replica, core in np.ndindex(shape):
        place = assignment.coordinates(replica, core)
        devices[replica, core] = assignment.topology.device_at_coordinates(
            place
        )
    return devices


def _check_topology(topology: object) -> Topology:
    if not isinstance(topology, Topology):
        raise ValueError(
            f"`topology` is a Topology. Received: {type(topology).__name__}. "
            "Make one with `Topology.from_devices(jax.devices())`."
        )
    return topology


def _check_cores(topology: Topology, value: object) -> IntArray:
    cores = read_integers("core_assignment", value)
    if cores.ndim != 3 or cores.shape[2] != topology.mesh_rank:
        raise ValueError(
            "`core_assignment` has the shape (replicas, cores, 4). Received "
            f"the shape {cores.shape}."
        )
    if not cores.size:
        raise ValueError(
            "An assignment has at least one replica of one core. Received "
            f"`core_assignment` of the shape {cores.shape}."
        )
    owners: dict[Cell, tuple[int, int]] = {}
    for replica, core in np.ndindex(cores.shape[:2]):
        place = tuple(cores[replica, core].tolist())
        try:
            topology.task_ordinal_at_coordinates(place)
        except IndexError as error:
            raise ValueError(
                f"Core {core} of replica {replica} is not in the topology. "
                f"{error}"
            ) from error
        other = owners.setdefault(place, (replica, core))
        if other != (replica, core):
            raise ValueError(
                "A core belongs to one replica, once. Received: "
                f"core_assignment with {list(place)} as core {other[1]} of "
                f"replica {other[0]} and core {core} of replica {replica}."
            )
    return cores
