"""Shardings of variables: replicated, or sharded over cores and replicas.

A layout map shards variables over the cores of a replica, and XLA splits the
computations that use them. A partitioner shards variables over the replicas,
along another dimension.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies.cluster.exchange import same_variables
from keras_strategies.passes.specs import OverCores, Sharded, Spec
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import replicated_spec
from keras_strategies.variables.initial_values import note_existing
from keras_strategies.variables.layout_map import Axes, LayoutMap
from keras_strategies.variables.partitioners import Dimension, Partitioner
from keras_strategies.variables.sharded_variable import (
    PLACEMENT,
    make_plain,
    make_sharded,
)

# The mesh whose partitioner has already chosen the variable's dimension.
_ASKED = "_ks_asked_by"
# The state of a `keras.random.SeedGenerator`.
_SEED = "seed_generator_state"
_MAX_ERROR = 200
_HOST = "pinned_host"
"""JAX's name of the memory of the host that devices can read."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """The shardings of a variable that is not replicated on all devices.

    Attributes:
      mesh: The mesh of the strategy's replicas.
      sharding: The variable's sharding.
      slot_sharding: The sharding of the variable's optimizer slots and of its
        summed gradient.
      sum_dtype: The dtype in which the gradients are summed; None for the dtype
        of the gradients.
      has_host_slots: Whether the variable's slots are on the host.
      is_on_host: Whether the variable is on the host. JAX drops the kind of
        memory from shardings over GPUs that are absent.
    """

    mesh: ReplicaMesh
    sharding: NamedSharding
    slot_sharding: NamedSharding
    sum_dtype: str | None = None
    has_host_slots: bool = False
    is_on_host: bool = False


def get_placement(variable: keras.Variable) -> Placement | None:
    """Returns a variable's placement, or None if it is replicated."""
    return getattr(variable, PLACEMENT, None)


def forget_placement(variable: keras.Variable) -> None:
    """Makes `get_sharding` treat a variable as replicated again."""
    variable.__dict__.pop(_ASKED, None)
    if hasattr(variable, PLACEMENT):
        delattr(variable, PLACEMENT)
        make_plain(variable)


def get_sharding(variable: keras.Variable, mesh: ReplicaMesh) -> NamedSharding:
    """Returns a variable's sharding in a strategy's mesh."""
    placement = get_placement(variable)
    if placement is None or placement.mesh is not mesh:
        return mesh.whole
    return placement.sharding


def get_spec(variable: keras.Variable, mesh: ReplicaMesh) -> Spec:
    """Returns a variable's sharding in a function mapped over the replicas."""
    return _spec(get_sharding(variable, mesh), mesh)


def is_on_host(variable: keras.Variable) -> bool:
    """Returns whether a variable is stored in the memory of the host."""
    placement = get_placement(variable)
    return placement is not None and placement.is_on_host


def on_device(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the memory of the devices."""
    if sharding.memory_kind != _HOST:
        return sharding
    return NamedSharding(sharding.mesh, sharding.spec)


def get_gradient_spec(variable: keras.Variable, mesh: ReplicaMesh) -> Spec:
    """Returns the sharding of a weight's summed gradient and of its slots."""
    placement = get_placement(variable)
    if placement is None or placement.mesh is not mesh:
        return replicated_spec()
    spec = _spec(placement.slot_sharding, mesh)
    if isinstance(spec, Sharded) and placement.sum_dtype is not None:
        return dataclasses.replace(spec, sum_dtype=placement.sum_dtype)
    return spec


def any_sharded(variables: Iterable[keras.Variable], mesh: ReplicaMesh) -> bool:
    """Returns whether any of the variables is sharded over the replicas."""
    placed = [v for v in variables if get_placement(v) is not None]
    return any(isinstance(get_spec(v, mesh), Sharded) for v in placed)


def _spec(sharding: NamedSharding, mesh: ReplicaMesh) -> Spec:
    sharding = on_device(sharding)
    for dim, axis in enumerate(sharding.spec):
        if axis == mesh.axis:
            parts = mesh.cores_per_replica if mesh.context_parallel else 1
            return Sharded(sharding, dim, token_parts=parts)
    return OverCores(sharding) if any(sharding.spec) else replicated_spec()


def get_shapes(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of variables, to lower a program."""
    return [
        jax.ShapeDtypeStruct(
            tuple(v.shape), v.dtype, sharding=get_sharding(v, mesh)
        )
        for v in variables
    ]


class Placements:
    """The placements of a strategy's variables: replicated, or sharded.

    Args:
      mesh: The mesh of the replicas.
      layout_map: The layouts of variables over cores; see `LayoutMap`.
      partitioner: The partitioner that shards variables over the replicas,
        along dimensions that are not sharded over cores; or None.
    """

    def __init__(
        self,
        mesh: ReplicaMesh,
        layout_map: Mapping[str, Any] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        self._mesh = mesh
        self.partitioner = partitioner
        self.layout_map = LayoutMap(mesh, layout_map or {})
        self._is_compared = False
        self._shardings: dict[tuple[Axes, bool], NamedSharding] = {}

    def replace_layout_map(
        self, layout_map: Mapping[str, Any], variables: Iterable[keras.Variable]
    ) -> None:
        """Replaces the layout map; `assign` places the variables again."""
        self.layout_map = LayoutMap(self._mesh, layout_map)
        for variable in variables:
            forget_placement(variable)

    def assign(self, variables: Iterable[keras.Variable]) -> None:
        """Chooses the placements of variables, which `get_sharding` reads.

        Optimizer slots that already exist are found by their names, and are
        sharded in the same way as slots that are created in the scope
        (`shard_like`). Collective if a partitioner shards variables over
        several processes.

        Raises:
          ValueError: if a layout does not fit its variable, a variable matches
            two layouts, or processes shard a variable differently.
          RuntimeError: if another process could not shard a variable.
        """
        if not self.layout_map and self.partitioner is None:
            return
        variables = list(variables)
        new = list(filter(self._needs_choice, variables))
        over_cores = list(map(self.layout_map.find_axes, new))
        dims = self._choose_dimensions(new, over_cores)
        for variable, axes, dim in zip(new, over_cores, dims, strict=True):
            self._place(variable, axes, dim)
        shard_slots_by_names(variables, self._mesh)

    def _place(
        self, variable: keras.Variable, axes: Axes, dim: Dimension
    ) -> None:
        """Shards a variable over cores, and along `dim` over the replicas."""
        partitioner = self.partitioner
        offloads = partitioner is not None and partitioner.offloads(variable)
        if dim is None and not any(axes) and not offloads:
            return
        is_replicated = bool(partitioner and partitioner.has_replicated_weights)
        is_shared = self._mesh.context_parallel and not is_replicated
        if is_shared and dim is not None:
            axes = self._find_core_axes(variable, dim)
        slot_sharding = axes
        if dim is not None:
            slot_sharding = _strip_trailing(
                (*axes[:dim], self._mesh.axis, *axes[dim + 1 :])
            )
        placement = Placement(
            mesh=self._mesh,
            sharding=self._sharding(axes if is_replicated else slot_sharding),
            slot_sharding=self._sharding(slot_sharding, on_host=offloads),
            sum_dtype=partitioner.sum_dtype if partitioner else None,
            has_host_slots=offloads,
        )
        setattr(variable, PLACEMENT, placement)
        make_sharded(variable)

    def _find_core_axes(self, variable: keras.Variable, dim: Dimension) -> Axes:
        """Returns the axes over cores of a variable that replicas shard."""
        axes: list[str | None] = [None] * len(variable.shape)
        for other, size in enumerate(variable.shape):
            if other != dim and size % self._mesh.cores_per_replica == 0:
                axes[other] = self._mesh.model_axis
                break
        return tuple(axes)

    def _sharding(self, axes: Axes, *, on_host: bool = False) -> NamedSharding:
        if not any(axes) and not on_host:
            return self._mesh.whole
        key = axes if any(axes) else (), on_host
        if key not in self._shardings:
            kind, spec = _HOST if on_host else None, PartitionSpec(*key[0])
            self._shardings[key] = NamedSharding(
                self._mesh.mesh, spec, memory_kind=kind
            )
        return self._shardings[key]

    def _choose_dimensions(
        self, variables: list[keras.Variable], over_cores: list[Axes]
    ) -> list[Dimension]:
        """Returns the dimensions that the partitioner chooses in all processes.

        It is asked once for each variable, so that a placement never changes.
        If processes sharded a variable differently, they would wait for each
        other in different programs. So they compare their choices: those of a
        `FullySharded` only once, and those of a function each time, because
        the function may return anything.
        """
        mesh, partitioner = self._mesh, self.partitioner
        if partitioner is None:
            return [None] * len(variables)
        is_single = mesh.num_processes == 1 or mesh.is_abstract
        is_known = self._is_compared and not partitioner.is_function
        # Scalars are never sharded.
        has_choice = any(tuple(v.shape) for v in variables)
        is_compared = has_choice and not (is_single or is_known)
        dims: list[Dimension] = []
        for variable, axes in zip(variables, over_cores, strict=True):
            try:
                dim = partitioner.choose_dimension(
                    variable.path, tuple(variable.shape), variable.dtype, axes
                )
            except Exception as error:
                if is_compared:
                    text = f"{type(error).__name__}: {error}"
                    note_existing(mesh, variable, text[:_MAX_ERROR])
                    # The other processes raise it, and this one its error.
                    with contextlib.suppress(ValueError):
                        same_variables.compare(mesh.processes)
                raise
            dims.append(dim)
            if is_compared:
                along = "no dimension" if dim is None else f"dimension {dim}"
                by = f"{along} by {partitioner.describe()}"
                note_existing(mesh, variable, by)
        if is_compared:
            same_variables.compare(mesh.processes)
            self._is_compared = True
        for variable in variables:
            setattr(variable, _ASKED, mesh)
        return dims

    def _needs_choice(self, variable: keras.Variable) -> bool:
        if variable.synchronization == "on_read" or variable.shape is None:
            return False
        if self.partitioner is None:
            return True
        placement = get_placement(variable)
        is_placed = placement is not None and placement.mesh is self._mesh
        is_decided = getattr(variable, _ASKED, None) is self._mesh
        return not (is_placed or is_decided or variable.name == _SEED)


def _strip_trailing(axes: Axes) -> Axes:
    """Removes trailing None entries from axes, as JAX does."""
    last = max(i for i, axis in enumerate(axes) if axis is not None)
    return axes[: last + 1]


def shard_like(slot: keras.Variable, weight: keras.Variable) -> None:
    """Shards an optimizer slot with the sharding for its weight's slots."""
    placement = get_placement(weight)
    if placement is not None and tuple(slot.shape) == tuple(weight.shape):
        slot_placement = dataclasses.replace(
            placement,
            sharding=placement.slot_sharding,
            is_on_host=placement.has_host_slots,
        )
        setattr(slot, PLACEMENT, slot_placement)
        make_sharded(slot)


def shard_slots_by_names(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> None:
    """Shards slots that were created outside of the scope, by their names.

    Args:
      variables: Weights, and slots that still have the names that the optimizer
        gave them.
      mesh: The mesh of the replicas.
    """
    variables = list(variables)
    weights: dict[str, tuple[keras.Variable, set[Any]]] = {}
    for weight in variables:
        placement = get_placement(weight)
        if placement is not None and placement.mesh is mesh:
            prefix = weight.path.replace("/", "_") + "_"
            on_host = placement.has_host_slots
            axes = _list_axes(placement.slot_sharding, on_host)
            weights[prefix] = weight, axes
    if not weights:
        return
    for slot in variables:
        # A slot is named after its weight's path ("dense_kernel_momentum"),
        # which may contain "_" itself. So every prefix that ends with "_" is
        # tried.
        ends = (i + 1 for i, letter in enumerate(slot.name) if letter == "_")
        for end in ends:
            weight, axes = weights.get(slot.name[:end], (slot, set()))
            # A slot that is already placed like this stays as it is.
            if axes - _list_axes(get_sharding(slot, mesh), is_on_host(slot)):
                shard_like(slot, weight)


def _list_axes(sharding: NamedSharding, is_on_host: bool) -> set[Any]:
    """Returns the axes of a sharding, with the host as one of them."""
    return {*sharding.spec, *([_HOST] if is_on_host else [])} - {None}
