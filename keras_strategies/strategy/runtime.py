"""`Runtime`: the immutable state of a strategy."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.fit.generating import check_calls
from keras_strategies.gpu import topology_devices
from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.partitioners import (
    Partitioner,
    PartitionerLike,
    Replicated,
)
from keras_strategies.variables.shardings import Placements
from keras_strategies.variables.variable_creator import (
    Registry,
    ReplicaDistribution,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """The objects that a strategy consists of.

    Attributes:
      mesh: The mesh of replicas.
      registry: The variables created in the strategy's scope.
      distribution: The Keras distribution that places new variables.
      outputs_on_chief: Whether `predict` returns rows only in the chief.
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
        """Makes the runtime of a strategy for a mesh."""
        if (dry := dry_run.get()) is not None:
            mesh, layout_map, variable_partitioner = dry.lay_out(
                mesh, layout_map, variable_partitioner
            )
        if not mesh.is_abstract:
            topology_devices.note_platform(mesh.platform)
        registry = Registry()
        if mesh.num_processes > 1:
            check_calls(registry)
        partitioner, mesh = _bind(variable_partitioner, mesh)
        placements = Placements(mesh, layout_map, partitioner)
        return cls(
            mesh=mesh,
            registry=registry,
            distribution=ReplicaDistribution(mesh, registry, placements),
            outputs_on_chief=outputs_on_chief,
        )


def is_chief_alone(predict_in: str) -> bool:
    """Returns whether `predict` returns rows only in the chief.

    Raises:
      ValueError: if `predict_in` is neither "all" nor "chief".
    """
    if predict_in not in ("all", "chief"):
        raise ValueError(
            "`predict_in` must be 'all' or 'chief'. Received: "
            f"predict_in={predict_in!r}. Pass 'all' if `predict` should return "
            "all rows in every process, or 'chief' for only process 0."
        )
    return predict_in == "chief"


def _bind(
    partitioner: PartitionerLike | None, mesh: ReplicaMesh
) -> tuple[Partitioner | None, ReplicaMesh]:
    """Binds a partitioner to a mesh.

    Returns:
      The bound partitioner and a copy of the mesh with the partitioner's number
      of shards. If all variables are replicated, the mesh has the dtype of
      sums, and the partitioner is None unless slots are on the host.
    """
    if partitioner is None:
        return None, mesh
    if isinstance(partitioner, Replicated):
        # A single replica sends nothing.
        dtype = partitioner.reduce_dtype if mesh.num_replicas > 1 else None
        bound = Partitioner(partitioner, mesh) if partitioner.offload else None
        return bound, dataclasses.replace(mesh, shards=None, reduce_dtype=dtype)
    bound = Partitioner(partitioner, mesh)
    return bound, dataclasses.replace(mesh, shards=bound.shards)
