"""The devices of a strategy, as a mesh with one replica axis."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMesh:
    """One replica per device.

    Attributes:
      devices: The devices, in the order of the replica ids; no device twice.
      axis: Name of the mesh axis that the replicas lie on.
      marker: Name of a second axis, of size one, by which JAX tells this mesh
        from another with the same devices; or None.
    """

    devices: tuple[jax.Device, ...]
    axis: str = "replica"
    marker: str | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(
                "A strategy needs at least one device. Received: devices=()."
                " Leave `devices` out to use all of them."
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(
                "No duplicates allowed in `devices`: a device is one replica."
                f" Received: {[str(d) for d in self.devices]}. Name each "
                "device once."
            )
        owners = [device.process_index for device in self.devices]
        counts = {owners.count(owner) for owner in self.processes}
        if owners != sorted(owners) or len(counts) > 1:
            raise ValueError(
                "All processes hold equally many replicas, in the order of "
                f"the processes. Received: devices of processes {owners}. "
                "Choose as many devices in each process, sorted."
            )

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The JAX mesh, of shape (num_replicas,), or with a marker's axis."""
        devices = np.array(self.devices, dtype=object)
        if self.marker is not None:
            return Mesh(devices[:, None], (self.axis, self.marker))
        return Mesh(devices, (self.axis,))

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every replica holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """The sharding of a batch whose rows are split over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """As `split`, for several batches stacked in the first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.axis))

    @property
    def num_replicas(self) -> int:
        """Number of replicas, which is the number of devices."""
        return len(self.devices)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """JAX's ids of the processes that hold replicas, in their order."""
        return tuple(dict.fromkeys(d.process_index for d in self.devices))

    @property
    def num_processes(self) -> int:
        """Number of processes that hold replicas."""
        return len(self.processes)

    @functools.cached_property
    def process_index(self) -> int:
        """Which of `processes` this one is."""
        if len(self.processes) == 1:
            return 0
        return self.processes.index(jax.process_index())

    @property
    def replicas_per_process(self) -> int:
        """Number of replicas in each process."""
        return self.num_replicas // self.num_processes

    @functools.cached_property
    def local_replicas(self) -> range:
        """The ids of this process's replicas."""
        count = self.replicas_per_process
        start = self.process_index * count
        return range(start, start + count)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.process_index == 0

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform
