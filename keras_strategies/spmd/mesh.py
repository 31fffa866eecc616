"""The devices of a strategy, as a mesh of replicas and their cores."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from keras_strategies.passes.constrained_operations import (
    leave_out_open_constraints,
)
from keras_strategies.passes.specs import Axis
from keras_strategies.spmd.mesh_checks import check_cores, check_owners

GROUPS = "group"
"""Name of the mesh axis of the groups over which variables are sharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMesh:
    """The devices of a strategy, grouped into replicas.

    A replica consists of one or several devices (its cores).

    User-defined strategies are built from a mesh (docs/extending.md). The
    attribute `mesh` of every strategy is its mesh.

    Attributes:
      devices: JAX devices without duplicates, in the order of the replica ids.
        The cores of a replica are next to each other. Pass the same list in all
        processes; each process must own the same number of these devices.
        Processes that share a replica must share all of their replicas.
      axis: Name of the mesh axis of the replicas.
      cores_per_replica: Number of devices of each replica.
      model_axis: Name of the mesh axis of a replica's cores. Used only if
        replicas have several cores.
      context_parallel: Whether a replica's cores share its sequences, each a
        part of the tokens; see `TPUStrategy`.
      shards: If the strategy has a `variable_partitioner`: the number of
        consecutive replicas over which variables are sharded. None for all
        replicas.
      reduce_dtype: The dtype in which gradients of replicated variables are
        sent and summed; see `ks.experimental.Replicated`. None for the dtype of
        the gradients.
      is_abstract: Whether the devices are TPUs or GPUs that are not
        present: programs can be compiled for it but not run.

    Raises:
      ValueError: if `devices` is empty; if there are duplicates; if the
        number of devices is not divisible by `cores_per_replica`; if
        `reduce_dtype` is not a float dtype; if `context_parallel` is not a
        bool, or replicas of one core should share sequences; if processes have
        different numbers of replicas; or if processes share only some of their
        replicas.
      TypeError: if an entry of `devices` is not a JAX device.

    Example:
      ```python
      class EveryOther(ks.Strategy):
          def __init__(self):
              super().__init__(ks.ReplicaMesh(devices=jax.devices()[::2]))
      ```
    """

    devices: Sequence[jax.Device]
    axis: str = "replica"
    cores_per_replica: int = 1
    model_axis: str = "model"
    context_parallel: bool = False
    shards: int | None = None
    reduce_dtype: str | None = None
    is_abstract: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        dtype = standardize_reduce_dtype(self.reduce_dtype)
        object.__setattr__(self, "reduce_dtype", dtype)
        others = [d for d in self.devices if not hasattr(d, "process_index")]
        if others:
            raise TypeError(
                "The devices of a mesh must be JAX devices. Received: "
                f"{others[0]!r} of type {type(others[0]).__name__}. Pass "
                "devices from `jax.devices()`."
            )
        if not self.devices:
            raise ValueError(
                "A strategy must have at least one device. Received: "
                "devices=(). Omit `devices` to use all available devices."
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(
                "`devices` must not contain duplicates. Received: "
                f"{format_devices(self.devices)}. Pass each device once."
            )
        cores = self.cores_per_replica
        check_cores(len(self.devices), cores, self.context_parallel)
        if self.shards is not None and (
            self.shards < 1 or self.num_replicas % self.shards
        ):
            raise ValueError(
                "`shards` must divide the number of replicas. "
                f"Received: shards={self.shards} with {self.num_replicas} "
                "replicas. Pass a divisor of the number of replicas."
            )
        check_owners(self._owners, cores)

    @property
    def _owners(self) -> list[int]:
        return [device.process_index for device in self.devices]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The JAX mesh, of shape (num_replicas,) or (num_replicas, cores).

        If variables are sharded within several groups of replicas, its shape is
        (groups, replicas per group, ...).
        """
        axes = list(self.replica_axes)
        shape = [self.num_replicas]
        if len(axes) > 1:
            shards = self.shards or self.num_replicas
            shape = [self.num_replicas // shards, shards]
        if self.cores_per_replica > 1:
            leave_out_open_constraints(axes[0])
            shape.append(self.cores_per_replica)
            axes.append(self.model_axis)
        return make_mesh(self.devices, axes, shape)

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is replicated on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """The sharding of a batch whose rows are split over the replicas.

        Each core of a replica has a copy of the replica's rows.
        """
        return NamedSharding(self.mesh, PartitionSpec(self.all_replicas))

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """The sharding of stacked batches, of shape (steps, rows, ...).

        The rows are split over the replicas, as in `split`.
        """
        spec = PartitionSpec(None, self.all_replicas)
        return NamedSharding(self.mesh, spec)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The names of the replicas' mesh axes: (axis,) or (groups, axis)."""
        is_one_group = self.shards in (None, self.num_replicas)
        return (self.axis,) if is_one_group else (GROUPS, self.axis)

    @property
    def all_replicas(self) -> Axis:
        """The replicas' mesh axes in the format that JAX's collectives accept.

        A name if there is one axis, else a tuple of names. Partition specs
        accept the same format.
        """
        axes = self.replica_axes
        return self.axis if len(axes) == 1 else axes

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices) // self.cores_per_replica

    @property
    def first_devices(self) -> tuple[jax.Device, ...]:
        """The first device of each replica, in the order of replica ids."""
        return tuple(self.devices[:: self.cores_per_replica])

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The JAX ids of the processes whose devices are in the mesh.

        They are in the order of the processes' first devices.
        """
        return tuple(dict.fromkeys(self._owners))

    @property
    def num_processes(self) -> int:
        """The number of processes whose devices are in the mesh."""
        return len(self.processes)

    @functools.cached_property
    def process_index(self) -> int:
        """The index of this process in `processes`."""
        if len(self.processes) == 1:
            return 0
        return self.processes.index(jax.process_index())

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The JAX process ids, grouped by which processes read the same rows.

        Each process reads the rows of its replicas. If the cores of a replica
        belong to several processes, these processes read the same rows.
        """
        cores, owners = self.cores_per_replica, self._owners
        groups: dict[frozenset[int], tuple[int, ...]] = {}
        for start in range(0, len(owners), cores):
            group = tuple(dict.fromkeys(owners[start : start + cores]))
            groups.setdefault(frozenset(group), group)
        return tuple(groups.values())

    @property
    def num_readers(self) -> int:
        """The number of groups of processes that read the same rows."""
        return len(self.readers)

    @functools.cached_property
    def reader_index(self) -> int:
        """The index of this process's group in `readers`."""
        if len(self.readers) == 1:
            return 0
        process = jax.process_index()
        return next(i for i, g in enumerate(self.readers) if process in g)

    @property
    def place_among_readers(self) -> int:
        """The index of this process within its group of `readers`."""
        group = self.readers[self.reader_index]
        return group.index(jax.process_index()) if len(group) > 1 else 0

    @property
    def spans_processes(self) -> bool:
        """Whether the cores of a replica belong to several processes."""
        return self.num_readers < self.num_processes

    @property
    def replicas_per_process(self) -> int:
        """The number of replicas that have cores in each process."""
        return self.num_replicas // self.num_readers

    @functools.cached_property
    def local_replicas(self) -> range:
        """The ids of the replicas that have cores in this process."""
        count = self.replicas_per_process
        start = self.reader_index * count
        return range(start, start + count)

    def first_of_readers(self, values: Sequence[Any]) -> list[Any]:
        """Selects the value of the first process of each group in `readers`.

        Args:
          values: One value for each process, in the order of `processes`.
        """
        by_process = dict(zip(self.processes, values, strict=True))
        return [by_process[group[0]] for group in self.readers]

    @property
    def spreads_shards(self) -> bool:
        """Whether a variable's shards are spread over several processes."""
        shards = self.shards or 1
        return shards > self.replicas_per_process or self.spans_processes

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files and prints."""
        return self.process_index == 0

    def check_can_run(self) -> None:
        """Raises RuntimeError if programs can only be compiled, not run."""
        if self.is_abstract:
            raise RuntimeError(
                "This strategy can only compile programs, because its devices "
                "are not available to this process. Received: a call that must "
                f"run on {format_devices(self.devices)}. To compile, call "
                "`strategy.compile_step(model, batch)` or "
                "`strategy.compile_run(fn, args)`. To run, create the strategy "
                "without `for_topology`, on a machine with such devices."
            )

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform


def format_devices(devices: Sequence[jax.Device]) -> str:
    """Formats devices for a message, at most the first eight."""
    names = ", ".join(map(str, devices[:8]))
    return f"[{names}{', ...' if len(devices) > 8 else ''}]"


def has_sharding(array: jax.Array, sharding: NamedSharding) -> bool:
    """Returns whether an array has the given sharding or an equivalent one.

    The classes of the two must also be equal: on one device all shardings are
    equivalent, but JAX compiles a program again if the class of an input's
    sharding changes.
    """
    own = array.sharding
    is_of_class = type(own) is type(sharding)
    return is_of_class and own.is_equivalent_to(sharding, array.ndim)


def copy_with_sharding(
    array: jax.Array, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Returns a copy of an array with the given sharding.

    The copy shares no buffers with the original, so a program may donate the
    copy's buffers.
    """
    moved = jax.device_put(array, sharding)
    if not moved.is_fully_addressable:
        return jnp.copy(moved)
    # `device_put` is preferred to `jnp.copy`, which compiles a program for each
    # shape. `may_alias=False` only has an effect on an array that already has
    # the sharding. An array that is moved may share the source's buffer (jax
    # 0.10.2), hence the second call.
    return jax.device_put(moved, sharding, may_alias=False)


def standardize_reduce_dtype(raw: Any) -> str | None:
    """Returns the name of a dtype of sums, for example of `jnp.bfloat16`.

    Raises:
      ValueError: if it is neither a float dtype nor None.
    """
    try:
        dtype = None if raw is None else np.dtype(raw).name
    except (TypeError, ValueError):
        dtype = ""
    if dtype not in (None, "bfloat16", "float16", "float32", "float64"):
        raise ValueError(
            "`reduce_dtype` must be a float dtype. Received: "
            f"{raw!r} of type {type(raw).__name__}. Pass 'bfloat16' to sum "
            "gradients in it, or None to use the dtype of the gradients."
        )
    return dtype


def make_mesh(
    devices: Sequence[jax.Device], axes: Sequence[str], shape: Any = -1
) -> Mesh:
    """Returns a JAX mesh over whose axes XLA partitions automatically."""
    array = np.array(devices, dtype=object).reshape(shape)
    return Mesh(array, tuple(axes), (AxisType.Auto,) * len(axes))
