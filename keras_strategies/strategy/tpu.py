"""TPUStrategy: replicas of one TPU core each, or of several."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.coordinates import slice_of
from keras_strategies.tpu.device_assignment import (
    DeviceAssignment,
    replica_mesh_devices,
)
from keras_strategies.tpu.device_order import default_device_order
from keras_strategies.tpu.topology import Topology
from keras_strategies.tpu.topology_devices import devices_by_name

Assignments = DeviceAssignment | Sequence[DeviceAssignment]


class TPUStrategy(Strategy):
    """Synchronous training on TPUs, of one host or of all hosts of a job.

    A replica is a TPU core or, with an assignment, a block of cores that
    share a model. Elsewhere than on TPUs it takes whatever devices JAX shows,
    so that a script can be tried without one. On several hosts every process
    runs the same script, and calls are collective, as with
    `MultiWorkerMirroredStrategy`.

    Args:
      tpu_cluster_resolver: A `TPUClusterResolver` of all hosts, which are
        joined here if they are not yet, or of "local" for this host's devices
        alone. None: all devices that JAX shows.
      device_assignment: The cores of each replica; of a job of several slices
        an assignment for each. None: each core is a replica.
      layout_map: Which variables a replica divides over its cores: a
        `keras.distribution.LayoutMap`, or a dict, from paths of variables or
        regular expressions to tuples of None and "model". Others are whole on
        every core. Not in tf, where `experimental_split_to_logical_devices`
        divides tensors.
      experimental_device_assignment: tf's other name of `device_assignment`.
      experimental_spmd_xla_partitioning: Not used: XLA always partitions.

    Raises:
      ValueError: an assignment without devices or given twice; cores of a
        replica in several processes; processes with different numbers of
        replicas; a wrong `layout_map`.
      TypeError: a resolver or an assignment that is none.

    Example:
      ```python
      topology = ks.tpu.experimental.initialize_tpu_system(
          devices=jax.devices()
      )
      assignment = ks.tpu.experimental.DeviceAssignment.build(
          topology, computation_shape=[2, 1, 1, 1], num_replicas=4
      )
      strategy = ks.TPUStrategy(
          device_assignment=assignment,
          layout_map={".*/kernel": (None, "model")},
      )
      ```

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: Assignments | None = None,
        *,
        layout_map: Mapping[str, Any] | None = None,
        experimental_device_assignment: Assignments | None = None,
        experimental_spmd_xla_partitioning: bool = True,
    ) -> None:
        del experimental_spmd_xla_partitioning
        if experimental_device_assignment is not None:
            if device_assignment is not None:
                raise ValueError(
                    "`experimental_device_assignment` is another name of "
                    "`device_assignment`. Received: both. Give one."
                )
            device_assignment = experimental_device_assignment
        resolver = _check_resolver(tpu_cluster_resolver)
        self._resolver = resolver
        if device_assignment is not None:
            mesh = mesh_of_assignments(device_assignment)
        else:
            devices = jax.devices() if resolver is None else resolver.devices()
            mesh = ReplicaMesh(devices=default_device_order(devices))
        super().__init__(mesh, layout_map=layout_map)

    @classmethod
    def for_topology(
        cls,
        name: str,
        *,
        num_slices: int = 1,
        computation_shape: Sequence[int] | None = None,
        layout_map: Mapping[str, Any] | None = None,
    ) -> "TPUStrategy":
        """A strategy over a TPU slice by its name, which compiles only.

        For `compile_step` and `compile_run`: the TPU compiler says what a
        step needs, on any Linux machine. Models are made in its scope as
        usual, and stay on the host. What would run on the slice (`fit`, `run`,
        `reduce`, ...) raises RuntimeError. Needs libtpu, the extra `tpu`.

        Args:
          name: Generation and chips in each dimension, as "v5e:16x16".
          num_slices: The number of such slices, joined by the data centre.
          computation_shape: A replica's cores in x, y, z and core; one core
            if left out. Replicas fill the slice.
          layout_map: See `TPUStrategy`.

        Raises:
          ImportError: libtpu is not installed.
          ValueError: no such slice, or an impossible `computation_shape`.

        Example:
          ```python
          strategy = ks.TPUStrategy.for_topology("v5e:16x16")
          with strategy.scope():
              model = make_model()
              model.compile("adam", "mse")
          rows = 128 * strategy.num_replicas_in_sync
          batch = (
              jax.ShapeDtypeStruct((rows, 32), "float32"),
              jax.ShapeDtypeStruct((rows, 1), "float32"),
          )
          print(strategy.compile_step(model, batch))
          ```
        """
        devices = devices_by_name(name, num_slices=num_slices)
        if computation_shape is None:
            ordered, cores = default_device_order(devices), 1
        else:
            blocks = [
                replica_mesh_devices(_filling(part, computation_shape))
                for part in _slices(devices)
            ]
            ordered, cores = _in_order(np.concatenate(blocks))
        mesh = ReplicaMesh(
            devices=ordered, cores_per_replica=cores, is_abstract=True
        )
        made = cls.__new__(cls)
        made._resolver = None
        Strategy.__init__(made, mesh, layout_map=layout_map)
        return made

    @property
    def cluster_resolver(self) -> TPUClusterResolver | None:
        """The resolver given, or None."""
        return self._resolver


def mesh_of_assignments(assignments: Assignments) -> ReplicaMesh:
    """The mesh of an assignment, or of one for each slice.

    The replicas of a process follow each other: where an assignment's do not,
    they are sorted by processes, else in its order.

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
    devices = np.concatenate([replica_mesh_devices(a) for a in assignments])
    ordered, cores = _in_order(devices)
    return ReplicaMesh(devices=ordered, cores_per_replica=cores)


def _in_order(devices: Any) -> tuple[tuple[jax.Device, ...], int]:
    """Replicas' devices, those of a process after each other."""
    owners = [cores[0].process_index for cores in devices]
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


def _check_resolver(resolver: Any) -> TPUClusterResolver | None:
    if resolver is None or isinstance(resolver, TPUClusterResolver):
        return resolver
    raise TypeError(
        "`tpu_cluster_resolver` is a TPUClusterResolver or None. Received: "
        f"an object of type {type(resolver).__name__}. Where another resolver "
        "describes the cluster, call `jax.distributed.initialize` with it and "
        "leave it out, or use `MultiWorkerMirroredStrategy`."
    )
