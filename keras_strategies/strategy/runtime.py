"""The fact sheet of a strategy, handed down to what it starts."""

import dataclasses

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.layout import Registry, ReplicaDistribution


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """What one strategy is made of.

    Attributes:
      mesh: Its replicas.
      registry: The variables created in its scope.
      distribution: Its variable creator.
    """

    mesh: ReplicaMesh
    registry: Registry
    distribution: ReplicaDistribution

    @classmethod
    def over(cls, mesh: ReplicaMesh) -> "Runtime":
        """The runtime of a strategy over `mesh`."""
        registry = Registry()
        return cls(
            mesh=mesh,
            registry=registry,
            distribution=ReplicaDistribution(mesh, registry),
        )
