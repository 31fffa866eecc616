"""Shardings of variables: replicated, or divided over cores and replicas.

A replica of several cores may divide its variables over them. Which ones is
said by paths, as `keras.distribution.LayoutMap` does; XLA divides the work
that uses them. What a partitioner says is divided over the replicas, along
another dimension.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies._core.jaxprs.specs import OverCores, Sharded, Spec
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import replicated_spec
from keras_strategies.keras_bridge.variables.agreed_dimensions import (
    agreed_dimensions,
    dimensions_of,
)
from keras_strategies.keras_bridge.variables.layout_keys import LayoutKeys
from keras_strategies.keras_bridge.variables.partitioners import Partitioner
from keras_strategies.keras_bridge.variables.sharded_variable import (
    make_plain,
    make_sharded,
)

Axes = tuple[str | None, ...]
"""What each dimension of a variable is divided over; None: it is not."""

_PLACEMENT = "_ks_placement"
_UPDATED_REPLICATED = "_ks_updated_replicated"
# The mesh whose partitioner was asked about a variable.
_ASKED = "_ks_asked_by"
# The state of a `keras.random.SeedGenerator`.
_SEED = "seed_generator_state"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Where a strategy has put a variable that is not whole on each device.

    Attributes:
      mesh: The strategy's replicas.
      sharding: Of the variable.
      of_slots: Of an optimizer's slots for it, and of its gradient's sum.
      sum_dtype: The dtype in which its gradients are summed; None for theirs.
    """

    mesh: ReplicaMesh
    sharding: NamedSharding
    of_slots: NamedSharding
    sum_dtype: str | None = None


def placement_of(variable: keras.Variable) -> Placement | None:
    """Where some strategy has put a variable; None: whole on each device."""
    return getattr(variable, _PLACEMENT, None)


def forget_placement(variable: keras.Variable) -> None:
    """Makes a variable whole again for `sharding_of`."""
    variable.__dict__.pop(_ASKED, None)
    if hasattr(variable, _PLACEMENT):
        delattr(variable, _PLACEMENT)
        variable.__dict__.pop(_UPDATED_REPLICATED, None)
        make_plain(variable)


def sharding_of(variable: keras.Variable, mesh: ReplicaMesh) -> NamedSharding:
    """Where a variable lies in a strategy's mesh."""
    held = placement_of(variable)
    if held is None or held.mesh is not mesh:
        return mesh.whole
    return held.sharding


def spec_of(variable: keras.Variable, mesh: ReplicaMesh) -> Spec:
    """What a variable's value is to a function mapped over the replicas."""
    return _spec(sharding_of(variable, mesh), mesh)


def gradient_spec_of(variable: keras.Variable, mesh: ReplicaMesh) -> Spec:
    """Where the sum of a weight's gradients lies: where its slots do."""
    held = placement_of(variable)
    if held is None or held.mesh is not mesh:
        return replicated_spec()
    spec = _spec(held.of_slots, mesh)
    if isinstance(spec, Sharded) and held.sum_dtype is not None:
        return dataclasses.replace(spec, sum_dtype=held.sum_dtype)
    return spec


def any_sharded(variables: Iterable[keras.Variable], mesh: ReplicaMesh) -> bool:
    """Whether the replicas divide some of the variables among them."""
    placed = [v for v in variables if placement_of(v) is not None]
    return any(isinstance(spec_of(v, mesh), Sharded) for v in placed)


def _spec(sharding: NamedSharding, mesh: ReplicaMesh) -> Spec:
    for dim, axis in enumerate(sharding.spec):
        if axis == mesh.axis:
            return Sharded(sharding, dim)
    return OverCores(sharding) if any(sharding.spec) else replicated_spec()


def note_replicated_update(variables: Iterable[keras.Variable]) -> None:
    """Notes that a step updates divided variables whole, on each replica."""
    for variable in variables:
        if placement_of(variable) is not None:
            setattr(variable, _UPDATED_REPLICATED, True)


def is_updated_replicated(variable: keras.Variable) -> bool:
    """Whether a traced step updates a divided variable whole."""
    return getattr(variable, _UPDATED_REPLICATED, False)


def shapes_of(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """What a program is lowered with in the place of variables' values."""
    return [
        jax.ShapeDtypeStruct(
            tuple(v.shape), v.dtype, sharding=sharding_of(v, mesh)
        )
        for v in variables
    ]


class Placements:
    """Places a strategy's variables: replicated, or sharded.

    Args:
      mesh: The replicas.
      layout_map: Maps paths of variables, or regular expressions that match a
        whole path, to the axes of their dimensions: the mesh's model axis or
        None. A `keras.distribution.LayoutMap`, of whose layouts only the axes
        count, or a dict of tuples, and of functions of a shape that return
        them.
      partitioner: Shards variables over the replicas, along other dimensions
        than their cores; None: none.

    Raises:
      TypeError: `layout_map` is something else.
      ValueError: it names another axis, or one twice.
    """

    def __init__(
        self,
        mesh: ReplicaMesh,
        layout_map: Mapping[str, Any] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        self._mesh = mesh
        self.partitioner = partitioner
        self._is_compared = False
        self._map: dict[str, Any] = {}
        if layout_map is None:
            layout_map = {}
        if not isinstance(layout_map, Mapping):
            raise TypeError(
                "`layout_map` maps paths of variables to axes. Received: an "
                f"object of type {type(layout_map).__name__}. Pass for "
                f"example {{'.*/kernel': (None, {mesh.model_axis!r})}}."
            )
        self._keys = LayoutKeys(layout_map)
        for path in layout_map:
            layout = layout_map[path]
            is_function = callable(layout) and not hasattr(layout, "axes")
            self._map[path] = (
                layout if is_function else self._axes_of(path, layout)
            )
        self._has_map = bool(self._map) and mesh.cores_per_replica > 1
        self._shardings: dict[Axes, NamedSharding] = {}

    def check_keys(self, variables: Iterable[keras.Variable]) -> None:
        """Warns of keys of the layout map that match no variable.

        Raises:
          ValueError: none matches any.
        """
        if self._has_map:
            self._keys.check(variables)

    def assign(self, variables: Iterable[keras.Variable]) -> None:
        """Notes where variables lie, for `sharding_of`.

        A slot that an optimizer made before follows its weight by its name,
        as one that is made in the strategy's scope does (`follow`).
        Collective, where replicas of several processes divide variables.

        Raises:
          ValueError: a layout that a variable cannot have, or two for one;
            processes that divide a variable differently.
          RuntimeError: another process could not divide a variable.
        """
        if not self._has_map and self.partitioner is None:
            return
        variables = list(variables)
        if self.partitioner is not None:
            self._divide(variables, self.partitioner)
        else:
            for variable in variables:
                self._assign_one(variable)
        follow_by_names(variables, self._mesh)

    def _assign_one(self, variable: keras.Variable) -> None:
        shape = variable.shape
        if variable.synchronization == "on_read" or shape is None:
            return
        axes = self._axes_over_cores(variable)
        if any(axes):
            self._place(variable, self._sharding(axes))

    def _axes_over_cores(self, variable: keras.Variable) -> Axes:
        """What a variable's dimensions are divided over by the layout map."""
        shape, cores = variable.shape, self._mesh.cores_per_replica
        path = self._pattern_of(variable.path) if self._has_map else None
        if path is None:
            return (None,) * len(shape)
        axes = self._map[path]
        if callable(axes):
            axes = self._axes_of(path, axes(tuple(shape)))
        is_possible = len(axes) == len(shape) and all(
            axis is None or size % cores == 0
            for axis, size in zip(axes, shape, strict=True)
        )
        if not is_possible:
            raise ValueError(
                "A layout has an axis or None for each dimension of its "
                "variable, and the dimension of an axis is a multiple of a "
                f"replica's cores. Received: layout {axes} for variable "
                f"{variable.path!r} of shape {tuple(shape)}, "
                f"{cores} cores. Change its entry in `layout_map`."
            )
        return axes

    def _pattern_of(self, path: str) -> str | None:
        """The map's key for a variable; None if there is none."""
        if path in self._map:
            return path
        found = [key for key in self._map if re.fullmatch(key, path)]
        if len(found) > 1:
            raise ValueError(
                "A variable has one entry in `layout_map`. Received: variable "
                f"{path!r}, which {found} match. Change one of them."
            )
        return found[0] if found else None

    def _place(
        self,
        variable: keras.Variable,
        sharding: NamedSharding,
        of_slots: NamedSharding | None = None,
        sum_dtype: str | None = None,
    ) -> None:
        placement = Placement(
            mesh=self._mesh,
            sharding=sharding,
            of_slots=of_slots or sharding,
            sum_dtype=sum_dtype,
        )
        setattr(variable, _PLACEMENT, placement)
        make_sharded(variable, self._mesh)

    def _sharding(self, axes: Axes) -> NamedSharding:
        if not any(axes):
            return self._mesh.whole
        if axes not in self._shardings:
            self._shardings[axes] = NamedSharding(
                self._mesh.mesh, PartitionSpec(*axes)
            )
        return self._shardings[axes]

    def _divide(
        self, variables: list[keras.Variable], partitioner: Partitioner
    ) -> None:
        """Lets the replicas divide variables, as the partitioner says.

        It is asked once about each, so that a variable stays where it lies.
        """
        asked = [v for v in variables if self._is_to_ask(v)]
        over_cores = list(map(self._axes_over_cores, asked))
        dims = self._dimensions(partitioner, asked, over_cores)
        is_replicated = partitioner.has_replicated_weights
        for variable, axes, dim in zip(asked, over_cores, dims, strict=True):
            setattr(variable, _ASKED, self._mesh)
            if dim is None and not any(axes):
                continue
            of_slots = axes
            if dim is not None:
                of_slots = _without_end(
                    (*axes[:dim], self._mesh.axis, *axes[dim + 1 :])
                )
            self._place(
                variable,
                self._sharding(axes if is_replicated else of_slots),
                self._sharding(of_slots),
                partitioner.sum_dtype,
            )

    def _dimensions(
        self,
        partitioner: Partitioner,
        variables: list[keras.Variable],
        over_cores: list[Axes],
    ) -> list[int | None]:
        """What the partitioner says; compared between processes.

        A rule is compared once; a function may say anything each time.
        """
        mesh = self._mesh
        is_alone = mesh.num_processes == 1 or mesh.is_abstract
        is_known = self._is_compared and not partitioner.is_function
        # Of scalars there is nothing to ask.
        if is_alone or is_known or not any(tuple(v.shape) for v in variables):
            return dimensions_of(partitioner, variables, over_cores)
        dims = agreed_dimensions(partitioner, mesh, variables, over_cores)
        self._is_compared = True
        return dims

    def _is_to_ask(self, variable: keras.Variable) -> bool:
        if variable.synchronization == "on_read" or variable.shape is None:
            return False
        held = placement_of(variable)
        is_placed = held is not None and held.mesh is self._mesh
        is_asked = getattr(variable, _ASKED, None) is self._mesh
        return not (is_placed or is_asked or variable.name == _SEED)

    def _axes_of(self, path: str, layout: Any) -> Axes:
        model, given = self._mesh.model_axis, getattr(layout, "axes", layout)
        is_nest = isinstance(given, Iterable) and not isinstance(given, str)
        axes: tuple[Any, ...] = tuple(given) if is_nest else ()
        named = [axis for axis in axes if axis is not None]
        if not is_nest or set(named) - {model} or len(named) > 1:
            raise ValueError(
                "A variable is divided over a replica's cores, along one "
                f"dimension. Received: layout_map[{path!r}] = {given!r}. "
                f"It is a tuple of None, and {model!r} once at most."
            )
        return axes


def _without_end(axes: Axes) -> Axes:
    """Axes without None at the end, as JAX writes them."""
    last = max(i for i, axis in enumerate(axes) if axis is not None)
    return axes[: last + 1]


def follow(slot: keras.Variable, weight: keras.Variable) -> None:
    """Lays an optimizer's slot where the slots of its weight lie."""
    held = placement_of(weight)
    if held is not None and tuple(slot.shape) == tuple(weight.shape):
        placement = dataclasses.replace(held, sharding=held.of_slots)
        setattr(slot, _PLACEMENT, placement)
        make_sharded(slot, held.mesh)


def follow_by_names(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> None:
    """Lays slots that were made outside of the scope where their weights' lie.

    Args:
      variables: Weights, and slots with the names that optimizers give them.
      mesh: The replicas.
    """
    variables = list(variables)
    axes_of_slots: dict[str, tuple[keras.Variable, set[Any]]] = {}
    for weight in variables:
        held = placement_of(weight)
        if held is not None and held.mesh is mesh:
            prefix = weight.path.replace("/", "_") + "_"
            axes_of_slots[prefix] = weight, set(held.of_slots.spec)
    if not axes_of_slots:
        return
    for slot in variables:
        ends = (i + 1 for i, letter in enumerate(slot.name) if letter == "_")
        for end in ends:
            weight, axes = axes_of_slots.get(slot.name[:end], (slot, set()))
            if axes - set(sharding_of(slot, mesh).spec) - {None}:
                follow(slot, weight)
