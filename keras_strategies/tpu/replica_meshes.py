"""Functions that start TPUs, and that make replica meshes of devices.

A replica mesh defines which devices each replica uses, and in which order.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.tasks import AnyResolver
from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.device_assignment import (
    DeviceAssignment,
    replica_mesh_devices,
)
from keras_strategies.tpu.device_groups import (
    default_device_order,
    get_slice,
    group_replicas,
)
from keras_strategies.tpu.topology import Topology

Assignments = DeviceAssignment | Sequence[DeviceAssignment]


def choose_assignment(
    assignment: Assignments | None, experimental: Assignments | None
) -> Assignments | None:
    """Returns the device assignment that was passed in one of two arguments.

    Args:
      assignment: The argument `device_assignment` of the strategy.
      experimental: Its argument `experimental_device_assignment`.

    Raises:
      ValueError: if both arguments were passed.
    """
    if assignment is not None and experimental is not None:
        raise ValueError(
            "`experimental_device_assignment` and `device_assignment` must not "
            "be passed together. Pass only "
            "`device_assignment`."
        )
    return experimental if assignment is None else assignment


def make_mesh(
    resolver: TPUClusterResolver | None,
    assignments: Assignments | None,
    partitioner: object = None,
) -> ReplicaMesh:
    """Makes a mesh from device assignments, or with a replica on each core.

    Args:
      resolver: The resolver whose devices are used if `assignments` is None.
        Without a resolver, all devices are used.
      assignments: See `make_assigned_mesh`.
      partitioner: The partitioner of variables over groups of replicas, or
        None.
    """
    if assignments is not None:
        return make_assigned_mesh(assignments, partitioner)
    devices = jax.devices() if resolver is None else resolver.devices()
    return _make_core_mesh(devices, partitioner)


def _make_core_mesh(
    devices: Sequence[jax.Device], partitioner: object, **kwargs: Any
) -> ReplicaMesh:
    """Makes a mesh in which each core is a replica."""
    blocks = [
        np.array(part, dtype=object)[:, None]
        for part in _split_slices(default_device_order(devices))
    ]
    return _make_block_mesh(blocks, partitioner, **kwargs)


def make_abstract_mesh(
    devices: Sequence[jax.Device],
    computation_shape: Sequence[int] | None,
    partitioner: object = None,
) -> ReplicaMesh:
    """Makes a mesh of absent TPUs or GPUs, for compilation only.

    For the arguments, see `TPUStrategy.for_topology`.
    """
    if computation_shape is None:
        return _make_core_mesh(devices, partitioner, is_abstract=True)
    blocks = [
        replica_mesh_devices(_fill_slice(part, computation_shape))
        for part in _split_slices(devices)
    ]
    return _make_block_mesh(blocks, partitioner, is_abstract=True)


def make_assigned_mesh(
    assignments: Assignments,
    partitioner: object = None,
    *,
    is_abstract: bool = False,
) -> ReplicaMesh:
    """Makes the mesh of one device assignment, or of one for each TPU slice.

    In the mesh, replicas that belong together are contiguous: the replicas of
    one process, the replicas that several processes share, and the replicas
    of a group that shards variables. Replicas keep the assignment's order if
    it already has this property; otherwise they are sorted.

    Args:
      assignments: The assignment, or a list with one for each slice.
      partitioner: The partitioner of variables over groups of replicas, or
        None.
      is_abstract: Whether the mesh is for compilation only.

    Raises:
      ValueError: if the topology of an assignment was not made from devices,
        the assignments have different numbers of cores per replica, or
        `ReplicaMesh` rejects the devices.
      TypeError: if `assignments` is not an assignment or a list of them.
    """
    if isinstance(assignments, DeviceAssignment):
        assignments = [assignments]
    if not isinstance(assignments, Sequence) or not all(
        isinstance(a, DeviceAssignment) for a in assignments
    ):
        raise TypeError(
            "`device_assignment` must be a DeviceAssignment, or a list with a "
            f"DeviceAssignment for each slice. Received: {assignments!r}. "
            "Create them with `ks.tpu.experimental.DeviceAssignment.build`."
        )
    shapes = {a.num_cores_per_replica for a in assignments}
    if len(shapes) != 1:
        raise ValueError(
            "`device_assignment` must contain at least one assignment, and all "
            "assignments must have the same number of cores per replica. "
            "Received: assignments with "
            f"{[a.num_cores_per_replica for a in assignments]} cores per "
            "replica. Use the same `computation_shape` for all of them."
        )
    blocks = map(replica_mesh_devices, assignments)
    return _make_block_mesh(blocks, partitioner, is_abstract=is_abstract)


def _make_block_mesh(
    blocks: Iterable[np.ndarray], partitioner: object, **kwargs: Any
) -> ReplicaMesh:
    """Makes a mesh from an array of devices for each slice.

    Args:
      blocks: The devices of each slice, of shape (replicas, cores).
      partitioner: See `make_mesh`.
      **kwargs: Further arguments of `ReplicaMesh`.
    """
    shards = getattr(partitioner, "shards", None)
    parts = []
    for part in blocks:
        if partitioner is not None:
            part, shards = group_replicas(part, shards)
        parts.append(part)
    ordered, cores = _sort_by_process(np.concatenate(parts))
    return ReplicaMesh(
        devices=ordered, cores_per_replica=cores, shards=shards, **kwargs
    )


def _sort_by_process(
    devices: np.ndarray,
) -> tuple[tuple[jax.Device, ...], int]:
    """Sorts replicas so that those of each process are contiguous.

    Returns:
      The devices of all replicas, and the number of cores per replica.
    """
    owners = [frozenset(d.process_index for d in cores) for cores in devices]
    # Processes are in the order of their first replicas, and the replicas of a
    # process keep their order.
    first = {owner: i for i, owner in reversed(list(enumerate(owners)))}
    order = sorted(range(len(owners)), key=lambda r: first[owners[r]])
    return tuple(devices[order].flat), devices.shape[1]


def _fill_slice(
    devices: Sequence[jax.Device], computation_shape: Sequence[int]
) -> DeviceAssignment:
    """Makes an assignment whose replicas use all cores of a slice."""
    topology = Topology.from_devices(devices)
    one = DeviceAssignment.build(topology, computation_shape)
    cores, total = one.num_cores_per_replica, int(topology.mesh_shape.prod())
    if total % cores:
        raise ValueError(
            "The replicas must use all cores. Received: computation_shape="
            f"{list(computation_shape)} for cores in the shape "
            f"{topology.mesh_shape.tolist()}. Pass sizes that divide these."
        )
    return DeviceAssignment.build(
        topology, computation_shape, num_replicas=total // cores
    )


def _split_slices(devices: Iterable[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(devices, key=get_slice)
    return [list(part) for _, part in itertools.groupby(ordered, get_slice)]


def check_resolver(resolver: Any) -> TPUClusterResolver | None:
    """Returns the argument `tpu_cluster_resolver` of a strategy, if valid.

    Raises:
      TypeError: if it is neither a `TPUClusterResolver` nor None.
    """
    fix = (
        "With another resolver, omit `tpu_cluster_resolver` and call "
        "`jax.distributed.initialize` with that resolver's values, or use "
        "`MultiWorkerMirroredStrategy`."
    )
    kind, what = TPUClusterResolver | None, "a TPUClusterResolver or None"
    check_type("`tpu_cluster_resolver`", resolver, kind, what, fix)
    return resolver


def initialize_tpu_system(
    cluster_resolver: AnyResolver | None = None,
    *,
    devices: Iterable[jax.Device] | None = None,
) -> Topology:
    """Starts the TPUs, if necessary, and returns their topology.

    JAX starts the TPUs when a program first asks for its devices. On several
    hosts, the hosts must be connected before that. A `TPUClusterResolver` does
    this; without one, call `jax.distributed.initialize` first.

    Args:
      cluster_resolver: A `TPUClusterResolver`, whose hosts are connected and
        whose devices are used; or None. Any other resolver is ignored, because
        JAX finds the TPUs without it.
      devices: The devices to use instead of all TPUs. They may be of any
        platform, so that a script can be tried without a TPU.

    Raises:
      RuntimeError: if JAX finds no TPU and `devices` is not passed.
      TypeError: if `cluster_resolver` is not a resolver.

    Example:
      ```python
      topology = ks.tpu.experimental.initialize_tpu_system(
          devices=jax.devices()
      )
      ```
    """
    _check_resolver(cluster_resolver)
    if (dry := dry_run.get()) is not None:
        return Topology.from_devices(dry.devices)
    if devices is not None:
        return Topology.from_devices(devices)
    is_tpu = isinstance(cluster_resolver, TPUClusterResolver)
    tpus = cluster_resolver.devices() if is_tpu else jax.devices()
    if tpus[0].platform != "tpu":
        raise RuntimeError(
            "A TPU system needs TPUs. Received: "
            f"{len(tpus)} devices of the platform '{tpus[0].platform}'. "
            "On a TPU machine run `pip install 'jax[tpu]'` and leave "
            "JAX_PLATFORMS unset. On other machines, pass "
            "`devices=jax.devices()`, or use `Topology.from_name('v5e:4x4')` "
            "if you only want to compile."
        )
    return Topology.from_devices(tpus)


def shutdown_tpu_system(cluster_resolver: AnyResolver | None = None) -> None:
    """Deletes all compiled programs and frees their memory.

    Arrays are not deleted. Functions that are called later are compiled again.

    Differs from tf: the process continues to own its TPUs. JAX releases them
    when the process ends.

    Args:
      cluster_resolver: See `initialize_tpu_system`.

    Raises:
      TypeError: if `cluster_resolver` is not a resolver.

    Example:
      ```python
      ks.tpu.experimental.shutdown_tpu_system()
      ```
    """
    _check_resolver(cluster_resolver)
    jax.clear_caches()


def _check_resolver(cluster_resolver: object) -> None:
    if cluster_resolver is None or hasattr(cluster_resolver, "cluster_spec"):
        return
    raise TypeError(
        "`cluster_resolver` must be a cluster resolver or None. Received: "
        f"{cluster_resolver!r} of type {type(cluster_resolver).__name__}. "
        "Pass a `TPUClusterResolver`, or omit the argument."
    )
