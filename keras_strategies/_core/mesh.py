"""The devices of a strategy, as a mesh of replicas and their cores."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.open_shardings import leave_out_open_constraints

GROUPS = "group"
"""Name of the axis of groups of replicas that divide variables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMesh:
    """The devices of a strategy: replicas of one each, or of several.

    A strategy of one's own is made of it (docs/extending.md); that of any
    strategy is its `mesh`.

    Attributes:
      devices: JAX's devices, in the order of the replica ids, the cores of a
        replica after each other; no device twice. All processes name the same
        ones, equally many of each process. Processes that have cores of one
        replica have cores of the same replicas.
      axis: Name of the mesh axis that the replicas lie on.
      cores_per_replica: How many devices a replica has.
      model_axis: Name of the axis of a replica's cores, if it has several.
      shards: How many replicas, which follow each other, divide variables
        among them, if their strategy has a `variable_partitioner`. None: all.
      marker: Name of a further axis, of size one, by which JAX tells this mesh
        from another with the same devices; or None.
      is_abstract: Whether the devices are those of a TPU slice that can be
        compiled for, and not run on.

    Raises:
      ValueError: no devices, one twice, a number that the cores of a replica
        do not divide, other numbers of replicas in each process, or processes
        that share some of their replicas alone.
      TypeError: what is not a device of JAX.

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
    shards: int | None = None
    marker: str | None = None
    is_abstract: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        others = [d for d in self.devices if not hasattr(d, "process_index")]
        if others:
            raise TypeError(
                "A mesh is made of JAX's devices. Received: "
                f"{others[0]!r} of type {type(others[0]).__name__}. Pass "
                "devices of `jax.devices()`."
            )
        if not self.devices:
            raise ValueError(
                "A strategy needs at least one device. Received: devices=()."
                " Leave `devices` out to use all of them."
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(
                "No duplicates allowed in `devices`: a device is one replica."
                f" Received: {shown_devices(self.devices)}. Name each "
                "device once."
            )
        cores = self.cores_per_replica
        if cores < 1 or len(self.devices) % cores:
            raise ValueError(
                "Every replica has equally many devices. Received: "
                f"{len(self.devices)} devices, cores_per_replica={cores}. "
                "Choose a multiple of them."
            )
        if self.shards is not None and (
            self.shards < 1 or self.num_replicas % self.shards
        ):
            raise ValueError(
                "Shards are divided over groups of equally many replicas. "
                f"Received: shards={self.shards} of {self.num_replicas} "
                "replicas. Choose a number that divides them."
            )
        _check_owners(self._owners, cores)

    @property
    def _owners(self) -> list[int]:
        return [device.process_index for device in self.devices]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The JAX mesh: (num_replicas,), or also a replica's cores.

        Of several groups that divide variables it is (groups, replicas of a
        group, ...). With a marker it has that axis, too.
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
        if self.marker is not None:
            shape.append(1)
            axes.append(self.marker)
        devices = np.array(self.devices, dtype=object)
        return Mesh(devices.reshape(shape), tuple(axes))

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """The sharding of a batch whose rows are split over the replicas.

        All cores of a replica hold its rows.
        """
        return NamedSharding(self.mesh, PartitionSpec(self.all_replicas))

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """As `split`, for several batches stacked in the first dimension."""
        spec = PartitionSpec(None, self.all_replicas)
        return NamedSharding(self.mesh, spec)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes that the replicas lie on: of their groups, and in one."""
        is_one_group = self.shards in (None, self.num_replicas)
        return (self.axis,) if is_one_group else (GROUPS, self.axis)

    @property
    def all_replicas(self) -> Axis:
        """The replicas' axes, as collectives and specs take them."""
        axes = self.replica_axes
        return self.axis if len(axes) == 1 else axes

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.devices) // self.cores_per_replica

    @property
    def first_devices(self) -> tuple[jax.Device, ...]:
        """The first device of each replica."""
        return tuple(self.devices[:: self.cores_per_replica])

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """JAX's ids of the processes that hold replicas, in their order."""
        return tuple(dict.fromkeys(self._owners))

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

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """JAX's ids of the processes that read the same rows, together.

        Each process reads the rows of its replicas. Where the cores of a
        replica belong to several processes, those read the same.
        """
        cores, owners = self.cores_per_replica, self._owners
        found: dict[frozenset[int], tuple[int, ...]] = {}
        for start in range(0, len(owners), cores):
            group = tuple(dict.fromkeys(owners[start : start + cores]))
            found.setdefault(frozenset(group), group)
        return tuple(found.values())

    @property
    def num_readers(self) -> int:
        """Number of groups of processes that read other rows."""
        return len(self.readers)

    @functools.cached_property
    def reader_index(self) -> int:
        """Which of `readers` this process belongs to."""
        if len(self.readers) == 1:
            return 0
        process = jax.process_index()
        return next(i for i, g in enumerate(self.readers) if process in g)

    @property
    def place_among_readers(self) -> int:
        """Which of the processes that read the same rows this one is."""
        group = self.readers[self.reader_index]
        return group.index(jax.process_index()) if len(group) > 1 else 0

    @property
    def spans_processes(self) -> bool:
        """Whether the cores of a replica belong to several processes."""
        return self.num_readers < self.num_processes

    @property
    def replicas_per_process(self) -> int:
        """Number of replicas that each process has cores of."""
        return self.num_replicas // self.num_readers

    @functools.cached_property
    def local_replicas(self) -> range:
        """The ids of the replicas that this process has cores of."""
        count = self.replicas_per_process
        start = self.reader_index * count
        return range(start, start + count)

    def first_of_readers(self, of_processes: Sequence[Any]) -> list[Any]:
        """What the first process of each of `readers` has of something.

        Args:
          of_processes: Of each of `processes`.
        """
        found = dict(zip(self.processes, of_processes, strict=True))
        return [found[group[0]] for group in self.readers]

    @property
    def spreads_shards(self) -> bool:
        """Whether a variable that is divided has shards in other processes."""
        shards = self.shards or 1
        return shards > self.replicas_per_process or self.spans_processes

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.process_index == 0

    def check_can_run(self) -> None:
        """Raises RuntimeError if the devices can only be compiled for."""
        if self.is_abstract:
            raise RuntimeError(
                "This strategy compiles for TPUs that are not there, and "
                "cannot run: it has no values on them. Received: a call that "
                f"needs {shown_devices(self.devices[:1])} and "
                f"{len(self.devices) - 1} others to compute. Use "
                "`strategy.compile_step(model, batch)` or "
                "`strategy.compile_run(fn, args)`, and `ks.TPUStrategy()` "
                "on the TPU itself."
            )

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.devices[0].platform


def shown_devices(devices: Sequence[jax.Device]) -> str:
    """Devices for a message; of many, the first few."""
    names = ", ".join(map(str, devices[:8]))
    return f"[{names}{', ...' if len(devices) > 8 else ''}]"


def has_sharding(array: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array has a sharding, so that a program takes it as it is.

    On one device a sharding of another kind means the same, and JAX compiles
    a program anew for it.
    """
    return type(array.sharding) is type(
        sharding
    ) and array.sharding.is_equivalent_to(sharding, array.ndim)


def copied(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """A true copy of an array, with a sharding.

    Its buffers are nobody else's, so that a program may take them.
    """
    moved = jax.device_put(array, sharding)
    if not moved.is_fully_addressable:
        return jnp.copy(moved)
    # Compiles no program, as `jnp.copy` does for each shape. It copies only
    # what lies there already: what it moves shares the source's buffer
    # (jax 0.10.2).
    return jax.device_put(moved, sharding, may_alias=False)


def _check_owners(owners: list[int], cores: int) -> None:
    """Raises ValueError unless each process's replicas lie together.

    Args:
      owners: The process of each device.
      cores: How many devices a replica has.
    """
    of_replicas = [
        frozenset(owners[k : k + cores]) for k in range(0, len(owners), cores)
    ]
    groups = dict.fromkeys(of_replicas)
    shown = [sorted(group) for group in groups]
    if sum(map(len, groups)) > len(set(owners)):
        raise ValueError(
            "Processes that have cores of one replica have cores of the same "
            "replicas: they read the same rows. Received: replicas with cores "
            f"of the processes {_shown(shown)}. Choose a `computation_shape` "
            "within one host's chips, as [2, 2, 1, 1], or of whole hosts."
        )
    runs = [(k, len(list(run))) for k, run in itertools.groupby(of_replicas)]
    if len(runs) != len(groups) or len({count for _, count in runs}) > 1:
        of_each = [sorted(group) for group in of_replicas]
        told = [g[0] if len(g) == 1 else g for g in of_each]
        raise ValueError(
            "All processes hold equally many replicas, each its own after "
            "each other. Received: replicas of the processes "
            f"{_shown(told)}. Choose as many devices in each process, in the "
            "order of the processes."
        )


def _shown(items: list[Any]) -> str:
    return f"{items[:16]}{'...' if len(items) > 16 else ''}"
