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

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform
