"""Replica meshes of TPU devices, of assignments, and of topologies."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.coordinates import slice_of
from keras_strategies.tpu.device_assignment import (
    DeviceAssignment,
    replica_mesh_devices,
)
from keras_strategies.tpu.device_groups import (
    default_device_order,
    grouped_device_order,
    grouped_replicas,
)
from keras_strategies.tpu.topology import Topology
from keras_strategies.tpu.topology_devices import devices_by_name

Assignments = DeviceAssignment | Sequence[DeviceAssignment]


def the_one_given(
    assignment: Assignments | None, experimental: Assignments | None
) -> Assignments | None:
    """The assignment, under whichever of its two names it was given.

    Raises:
      ValueError: it was given under both.
    """
    if assignment is not None and experimental is not None:
        raise ValueError(
            "`experimental_device_assignment` is another name of "
            "`device_assignment`. Received: both. Give one."
        )
    return experimental if assignment is None else assignment


def mesh_of_devices(
    resolver: TPUClusterResolver | None,
    assignments: Assignments | None,
    partitioner: object = None,
) -> ReplicaMesh:
    """The mesh of an assignment, or of a replica on each core.

    Args:
      resolver: Whose devices are used without an assignment; None for all.
      assignments: See `mesh_of_assignments`.
      partitioner: Says which variables groups of replicas divide, or None.
    """
    if assignments is not None:
        return mesh_of_assignments(assignments, partitioner)
    devices = jax.devices() if resolver is None else resolver.devices()
    return _mesh_of_cores(devices, partitioner)


def _mesh_of_cores(
    devices: Sequence[jax.Device], partitioner: object, **kwargs: Any
) -> ReplicaMesh:
    """A replica on each core."""
    if partitioner is None:
        return ReplicaMesh(devices=default_device_order(devices), **kwargs)
    shards = getattr(partitioner, "shards", None)
    ordered, shards = grouped_device_order(devices, shards)
    return ReplicaMesh(devices=ordered, shards=shards, **kwargs)


def mesh_of_topology(
    name: str,
    num_slices: int,
    computation_shape: Sequence[int] | None,
    partitioner: object = None,
) -> ReplicaMesh:
    """The abstract mesh of slices by their name; see `for_topology`."""
    devices = devices_by_name(name, num_slices=num_slices)
    return abstract_mesh(devices, computation_shape, partitioner)


def abstract_mesh(
    devices: Sequence[jax.Device],
    computation_shape: Sequence[int] | None,
    partitioner: object = None,
) -> ReplicaMesh:
    """The mesh of replicas that fill slices, which is compiled for only."""
    if computation_shape is None:
        return _mesh_of_cores(devices, partitioner, is_abstract=True)
    blocks = [
        replica_mesh_devices(_filling(part, computation_shape))
        for part in _slices(devices)
    ]
    return _mesh_of_blocks(blocks, partitioner, is_abstract=True)


def mesh_of_assignments(
    assignments: Assignments,
    partitioner: object = None,
    *,
    is_abstract: bool = False,
) -> ReplicaMesh:
    """The mesh of an assignment, or of one for each slice.

    The replicas of a process follow each other, as do those of processes that
    share replicas, and those that divide variables: where an assignment's do
    not, they are sorted, else in its order.

    Args:
      assignments: The assignment, or one for each slice.
      partitioner: Says which variables groups of replicas divide, or None.
      is_abstract: Whether the devices are compiled for only.

    Raises:
      ValueError: an assignment without devices, or of other replicas than the
        first; what `ReplicaMesh` refuses.
      TypeError: no assignment.
    """
    if isinstance(assignments, DeviceAssignment):
        assignments = [assignments]
    if not isinstance(assignments, Sequence) or not all(
        isinstance(a, DeviceAssignment) for a in assignments
    ):
        raise TypeError(
            "`device_assignment` is a DeviceAssignment, or a list of one for "
            f"each slice. Received: {assignments!r}. Make one with "
            "`ks.tpu.experimental.DeviceAssignment.build`."
        )
    shapes = {a.num_cores_per_replica for a in assignments}
    if len(shapes) != 1:
        raise ValueError(
            "Replicas have equally many cores in all slices, and there is at "
            "least one. Received: assignments with cores per replica "
            f"{[a.num_cores_per_replica for a in assignments]}. Build all "
            "with one `computation_shape`."
        )
    blocks = map(replica_mesh_devices, assignments)
    return _mesh_of_blocks(blocks, partitioner, is_abstract=is_abstract)


def _mesh_of_blocks(
    blocks: Iterable[np.ndarray], partitioner: object, **kwargs: Any
) -> ReplicaMesh:
    """The mesh of the devices of each slice, (replicas, cores)."""
    shards = getattr(partitioner, "shards", None)
    parts = []
    for part in blocks:
        if partitioner is not None:
            part, shards = grouped_replicas(part, shards)
        parts.append(part)
    ordered, cores = _in_order(np.concatenate(parts))
    return ReplicaMesh(
        devices=ordered, cores_per_replica=cores, shards=shards, **kwargs
    )


def _in_order(devices: np.ndarray) -> tuple[tuple[jax.Device, ...], int]:
    """Replicas' devices, those of a process after each other."""
    owners = [frozenset(d.process_index for d in cores) for cores in devices]
    first = {owner: i for i, owner in reversed(list(enumerate(owners)))}
    order = sorted(range(len(owners)), key=lambda r: first[owners[r]])
    return tuple(devices[order].flat), devices.shape[1]


def _filling(
    devices: Sequence[jax.Device], computation_shape: Sequence[int]
) -> DeviceAssignment:
    """The assignment of as many replicas as a slice has room for."""
    topology = Topology.from_devices(devices)
    cores = int(np.prod(computation_shape)) or 1
    count = max(int(topology.mesh_shape.prod()) // cores, 1)
    return DeviceAssignment.build(
        topology, computation_shape, num_replicas=count
    )


def _slices(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(devices, key=slice_of)
    return [list(part) for _, part in itertools.groupby(ordered, slice_of)]


def check_resolver(resolver: object) -> TPUClusterResolver | None:
    """Returns the resolver of a TPUStrategy.

    Raises:
      TypeError: it is of another kind.
    """
    if resolver is None or isinstance(resolver, TPUClusterResolver):
        return resolver
    raise TypeError(
        "`tpu_cluster_resolver` is a TPUClusterResolver or None. Received: "
        f"an object of type {type(resolver).__name__}. Where another resolver "
        "describes the cluster, call `jax.distributed.initialize` with it and "
        "leave it out, or use `MultiWorkerMirroredStrategy`."
    )
