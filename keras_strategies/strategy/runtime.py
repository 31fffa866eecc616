"""The frozen facts of a strategy, for what it starts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.variables.partitioners import (
    PartitionerLike,
    bind_partitioner,
)
from keras_strategies.keras_bridge.variables.shardings import Placements
from keras_strategies.keras_bridge.variables.variable_creator import (
    Registry,
    ReplicaDistribution,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """What one strategy is made of.

    Attributes:
      mesh: Its replicas.
      registry: The variables created in its scope.
      distribution: Its variable creator.
      outputs_on_chief: Whether `predict` returns rows in the chief alone.
    """

    mesh: ReplicaMesh
    registry: Registry
    distribution: ReplicaDistribution
    outputs_on_chief: bool = False

    @classmethod
    def over(
        cls,
        mesh: ReplicaMesh,
        *,
        layout_map: Mapping[str, Any] | None = None,
        variable_partitioner: PartitionerLike | None = None,
        outputs_on_chief: bool = False,
    ) -> "Runtime":
        """The runtime of a strategy over `mesh`."""
        registry = Registry()
        partitioner, mesh = bind_partitioner(variable_partitioner, mesh)
        placements = Placements(mesh, layout_map, partitioner)
        return cls(
            mesh=mesh,
            registry=registry,
            distribution=ReplicaDistribution(mesh, registry, placements),
            outputs_on_chief=outputs_on_chief,
        )


def is_chief_alone(predict_in: str) -> bool:
    """Whether `predict` returns rows in the chief alone.

    Raises:
      ValueError: it is neither "all" nor "chief".
    """
    if predict_in not in ("all", "chief"):
        raise ValueError(
            "`predict` returns its rows in all processes or in the chief. "
            f"Received: predict_in={predict_in!r}. Pass 'all' or 'chief'."
        )
    return predict_in == "chief"
