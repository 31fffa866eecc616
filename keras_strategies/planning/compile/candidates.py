"""Candidates of a plan for a model's `fit`: strategies, models and batches."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

import jax
import keras

from keras_strategies._core.batches import num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Tree
from keras_strategies.keras_bridge.steps.lower_step import shape_of
from keras_strategies.keras_bridge.variables.abstract_models import abstract
from keras_strategies.keras_bridge.variables.transformer_layout import (
    transformer_layout,
)
from keras_strategies.planning.compile import layouts as lib
from keras_strategies.planning.compile.clones import clone_from_config
from keras_strategies.planning.compile.fit_step import FitStep
from keras_strategies.planning.compile.planner import Candidate
from keras_strategies.planning.compile.step import Step, with_rows
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.device_groups import grouped_device_order
from keras_strategies.tpu.replica_meshes import abstract_mesh
from keras_strategies.tpu.topology import Topology
from keras_strategies.tpu.topology_devices import devices_by_name


class MakingFailed(Exception):  # noqa: N818
    """The user's function failed, for whatever candidate; see its cause."""


Maker = Callable[[], keras.Model]

_MODEL_AXIS = 4
"""Cores of a replica, in a layout that is tried for transformers."""


class Batch:
    """The shapes of a global batch, for another number of replicas.

    Args:
      batch: `(x, y)` or `(x, y, sample_weight)`.
      replicas: Of whose global batch it is.
      is_global: Whether others get as many rows in all; else on each replica.

    Raises:
      ValueError: it is no batch, or has no rows.
    """

    def __init__(self, batch: Tree, replicas: int, *, is_global: bool) -> None:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            raise ValueError(
                "A plan is for a batch as `fit` trains on: `(x, y)` or `(x, "
                f"y, sample_weight)`. Received: an object of type "
                f"{type(batch).__name__}. Pass a tuple of arrays or shapes."
            )
        self._shapes = jax.tree.map(shape_of, batch)
        self._rows = num_rows(self._shapes)
        self._replicas, self._is_global = replicas, is_global

    def on(self, replicas: int) -> Tree:
        """The shapes of a global batch of so many replicas.

        Returns:
          A `jax.ShapeDtypeStruct` for each array, (rows, ...).
        """
        rows = self._rows
        if not self._is_global:
            rows = lib.rows_of(rows / self._replicas, replicas)
        return with_rows(self._shapes, rows)


def maker_of(model: object) -> Maker:
    """What makes the model that is planned.

    Args:
      model: A compiled model, or a function that makes one.

    Raises:
      ValueError: the model is not compiled.
      TypeError: it is neither.
    """
    if isinstance(model, keras.Model):
        if not model.compiled:
            raise ValueError(
                "A plan is for a compiled model. Received: "
                f"{model.name!r}, which is not compiled. Call `compile` first."
            )
        return functools.partial(clone_from_config, model)
    if not callable(model):
        raise TypeError(
            "A plan is for a Keras model, or a function that makes one. "
            f"Received: an object of type {type(model).__name__}. Pass a "
            "function that makes and compiles it."
        )
    return cast("Maker", model)


def candidates_of(
    own: Strategy,
    maker: Maker,
    batch: Batch,
    topologies: str | Sequence[str] | None,
    strategies: Any,
) -> Iterator[Candidate]:
    """The candidates of `Strategy.plan`; see there.

    Args:
      own: The strategy that plans.
      maker: Makes the model.
      batch: The batch.
      topologies: Names of slices; None: the strategy's own devices.
      strategies: Layouts; None: several.

    Raises:
      ValueError, TypeError: no such slice or layout.
    """
    if strategies is not None:
        is_many = isinstance(strategies, Sequence)
        if isinstance(strategies, str) or not is_many:
            strategies = [strategies]
        strategies = list(map(lib.layout_of, strategies))
    if topologies is None:
        devices = own.mesh.devices
        slices = {devices[0].device_kind: devices}
    else:
        names = lib.check_topologies(topologies)
        slices = {name: devices_by_name(name) for name in names}
    layout_maps = _LayoutMaps(maker)
    for name, devices in slices.items():
        layouts = strategies
        if layouts is None:
            layouts = layout_maps.possible(devices)
        for layout in layouts:

            def make(mesh: ReplicaMesh, layout: lib.Layout = layout) -> Step:
                cores = layout.cores
                layout_map = layout_maps.of(cores) if cores > 1 else None
                strategy = own._over(
                    mesh,
                    layout_map=layout_map,
                    variable_partitioner=layout.variable_partitioner,
                )
                return _fit_step(strategy, maker, batch)

            yield candidate_of(name, devices, layout, make)


def default_layouts(devices: Sequence[Any]) -> list[lib.Layout]:
    """The layouts that suit devices; the last one may be for transformers."""
    shards = grouped_device_order(devices, None)[1]
    layouts = lib.layouts_for(len(devices), shards)
    is_tpu = devices[0].platform == "tpu"
    if is_tpu and len(devices) >= _MODEL_AXIS**2:
        layouts.append(lib.Layout(divides="all", cores=_MODEL_AXIS))
    return layouts


class _LayoutMaps:
    """Layout maps of the transformer that is planned, by cores."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._model: keras.Model | None = None

    def possible(self, devices: Sequence[Any]) -> list[lib.Layout]:
        """Returns the default layouts without those that it has no map for."""
        return [x for x in default_layouts(devices) if self._allows(x)]

    def _allows(self, layout: lib.Layout) -> bool:
        if layout.cores > 1:
            try:
                self.of(layout.cores)
            except (ValueError, TypeError, RuntimeError):
                return False
        return True

    def of(self, cores: int) -> Mapping[str, Any]:
        """The one for replicas of so many cores."""
        if self._model is None:
            with abstract():
                self._model = self._maker()
        return transformer_layout(self._model, cores)


def candidate_of(
    name: str,
    devices: Sequence[Any],
    layout: lib.Layout,
    make: Callable[[ReplicaMesh], Step],
) -> Candidate:
    """A candidate.

    Args:
      name: The slice's.
      devices: Its devices.
      layout: How the model lies on them.
      make: Makes the step, for the replicas.
    """
    try:
        mesh = mesh_of(devices, layout)
    except (ValueError, TypeError) as error:
        # It has a row of its own in the plan.
        make_step = functools.partial(_fail, error)
        num_replicas = max(len(devices) // layout.cores, 1)
    else:
        make_step = functools.partial(make, mesh)
        devices, num_replicas = mesh.devices, mesh.num_replicas
    return Candidate(
        topology=name,
        layout=str(layout),
        devices=devices,
        num_replicas=num_replicas,
        make=make_step,
    )


def _fail(error: Exception) -> NoReturn:
    raise error


def mesh_of(devices: Sequence[Any], layout: lib.Layout) -> ReplicaMesh:
    """The replicas that a layout makes of devices.

    Raises:
      ValueError: it does not go together with them.
    """
    partitioner = layout.variable_partitioner
    shape = None
    if layout.cores > 1:
        if devices[0].platform != "tpu":
            raise ValueError(
                "Replicas of several cores are those of TPU slices. Received: "
                f"{layout} on devices of {devices[0].platform!r}. Leave "
                "'model' out."
            )
        mesh_shape = Topology.from_devices(devices).mesh_shape
        shape = lib.computation_shape(layout.cores, list(map(int, mesh_shape)))
        if shape is None:
            raise ValueError(
                "The cores of a replica are a box of the slice, of which a "
                f"multiple fills it. Received: {layout} for a slice of "
                f"{tuple(map(int, mesh_shape))} in x, y, z and core. Choose "
                "another number."
            )
    if devices[0].platform == "tpu":
        return abstract_mesh(devices, shape, partitioner)
    shards = getattr(partitioner, "shards", None)
    return ReplicaMesh(devices=tuple(devices), shards=shards)


def _fit_step(strategy: Strategy, maker: Maker, batch: Batch) -> Step:
    with strategy.scope(), abstract():
        model = _call(maker)
    strategy.attach(model)
    return FitStep(model, strategy, batch.on(strategy.mesh.num_replicas))


def _call(maker: Maker) -> keras.Model:
    try:
        model = maker()
        if isinstance(model, keras.Model) and model.compiled:
            return model
        raise TypeError(
            "The function that is planned returns a compiled Keras model. "
            f"Received: {model!r} of type {type(model).__name__}. Compile "
            "the model in the function, and return it."
        )
    except Exception as error:
        raise MakingFailed(str(error)) from error
