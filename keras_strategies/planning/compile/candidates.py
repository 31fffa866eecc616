"""Creates the candidates (topologies with layouts) for a plan of `fit`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras

from keras_strategies._types import Tree
from keras_strategies.planning.compile import layouts as lib
from keras_strategies.planning.compile.fit_step import FitStep
from keras_strategies.planning.compile.planner import Candidate
from keras_strategies.planning.compile.step import Step, with_rows
from keras_strategies.planning.seam import (
    ReplicaMesh,
    Strategy,
    Topology,
    abstract,
    get_shape,
    is_absent_gpu,
    make_devices,
    num_rows,
    partitioners,
    replica_meshes,
    transformer_layout,
)


class MakingFailed(Exception):  # noqa: N818
    """Raised if the user's function failed to create a model; see the cause."""


Maker = Callable[[], keras.Model]

_MODEL_AXIS = 4
"""The number of cores per replica in the default layout for transformers."""


class Batch:
    """The shapes of a global batch, for any number of replicas.

    Args:
      batch: `(x, y)` or `(x, y, sample_weight)`.
      replicas: The number of replicas that `batch` is divided among.
      is_global: Whether the total number of rows stays the same for other
        numbers of replicas. Otherwise the number of rows per replica stays the
        same.

    Raises:
      ValueError: if `batch` is not a valid batch, or has no rows.
    """

    def __init__(self, batch: Tree, replicas: int, *, is_global: bool) -> None:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            raise ValueError(
                "The batch of a plan must be `(x, y)` or `(x, y, "
                "sample_weight)`, as for `fit`. Received: an object of type "
                f"{type(batch).__name__}. Pass a tuple of arrays or shapes."
            )
        self._shapes = jax.tree.map(get_shape, batch)
        self._rows = num_rows(self._shapes)
        self._replicas, self._is_global = replicas, is_global

    def for_replicas(self, replicas: int) -> Tree:
        """Returns the shapes of the global batch for a number of replicas.

        Returns:
          A `jax.ShapeDtypeStruct` of shape (rows, ...) for each array.
        """
        rows = self._rows
        if not self._is_global:
            rows = lib.compute_rows(rows / self._replicas, replicas)
        return with_rows(self._shapes, rows)


def iter_candidates(
    base: Strategy,
    maker: Maker,
    batch: Batch,
    topologies: str | Sequence[str] | None,
    strategies: Any,
) -> Iterator[Candidate]:
    """Yields the candidates (topologies with layouts) for `Strategy.plan`.

    Args:
      base: The strategy whose `plan` was called.
      maker: A function that creates the model.
      batch: The shapes of the global batch.
      topologies: The names of TPU slices or GPUs. None for the strategy's
        devices.
      strategies: The layouts to plan. None for that of `base` and the default
        layouts.

    Raises:
      ValueError, TypeError: if a topology or a layout is not valid.
    """
    if strategies is not None:
        if isinstance(strategies, str) or not isinstance(strategies, Sequence):
            strategies = [strategies]
        strategies = list(map(lib.parse_layout, strategies))
    bound = base._runtime.distribution.placements.partitioner
    of_base = [] if bound is None else [lib.parse_layout(bound.original)]
    if topologies is None:
        devices = base.mesh.devices
        slices = {devices[0].device_kind: devices}
    else:
        slices = {
            name: make_devices(name, has_unlimited_memory=True)
            for name in lib.check_topologies(topologies)
        }

    @functools.cache
    def make_model() -> keras.Model:
        with abstract():
            return maker()

    def find_layout_map(layout: lib.Layout) -> Mapping[str, Any] | None:
        if layout.cores == 1:
            return None
        return transformer_layout(make_model(), layout.cores)

    def is_possible(layout: lib.Layout) -> bool:
        try:
            find_layout_map(layout)
        except (ValueError, TypeError, RuntimeError):
            return False
        return True

    def make(devices: Sequence[Any], layout: lib.Layout) -> Step:
        strategy = Strategy(
            make_mesh(devices, layout),
            layout_map=find_layout_map(layout),
            variable_partitioner=layout.partitioner,
        )
        with strategy.scope(), abstract():
            model = _call_maker(maker)
        strategy.attach(model)
        shapes = batch.for_replicas(strategy.mesh.num_replicas)
        return FitStep(model, strategy, shapes)

    for name, devices in slices.items():
        layouts = strategies
        if layouts is None:
            own = [omit_default_shards(x, devices) for x in of_base]
            layouts = filter(is_possible, list_default_layouts(devices))
            layouts = [*own, *(x for x in layouts if x not in own)]
        for layout in layouts:
            yield Candidate(
                topology=name,
                layout=str(layout),
                devices=devices,
                make=functools.partial(make, devices, layout),
            )


def list_default_layouts(devices: Sequence[Any]) -> list[lib.Layout]:
    """Returns the layouts to plan by default.

    The last layout may be one that only transformers can use.
    """
    layouts = lib.list_layouts(len(devices), _count_default_shards(devices))
    is_named = devices[0].platform == "tpu" or is_absent_gpu(devices[0])
    if is_named and len(devices) >= _MODEL_AXIS**2:
        layouts.append(lib.parse_layout(f"sharded+model:{_MODEL_AXIS}"))
    return layouts


def omit_default_shards(
    layout: lib.Layout, devices: Sequence[Any]
) -> lib.Layout:
    """Returns a layout without its number of shards if it is the default."""
    own = layout.partitioner
    kinds = partitioners.FullySharded, partitioners.SlotsOnly
    if type(own) in kinds and own.shards == _count_default_shards(devices):
        return lib.Layout(partitioner=dataclasses.replace(own, shards=None))
    return layout


def _count_default_shards(devices: Sequence[Any]) -> int:
    default = partitioners.FullySharded()
    mesh = make_mesh(devices, lib.Layout(partitioner=default))
    return partitioners.Partitioner(default, mesh).shards


def make_mesh(devices: Sequence[Any], layout: lib.Layout) -> ReplicaMesh:
    """Returns the mesh of replicas that a layout needs on the devices.

    Raises:
      ValueError: if the layout does not fit the devices.
    """
    partitioner = layout.partitioner
    shape = None
    if layout.cores > 1 and is_absent_gpu(devices[0]):
        host = devices[0].process_index
        number = sum(device.process_index == host for device in devices)
        if number % layout.cores:
            raise ValueError(
                "The GPUs of a replica must be in one host. Received: the "
                f"layout '{layout}' for {number} GPUs per host. Choose a "
                "divisor of this number."
            )
        shape = (layout.cores, 1, 1, 1)
    elif layout.cores > 1:
        if devices[0].platform != "tpu":
            raise ValueError(
                "Replicas with several cores need a TPU slice, or GPUs that "
                f"are given by their name. Received: the layout '{layout}' on "
                f"devices of the platform {devices[0].platform!r}. Use a "
                "layout without 'model'."
            )
        sides = tuple(map(int, Topology.from_devices(devices).mesh_shape))
        shape = lib.find_computation_shape(layout.cores, sides)
        if shape is None:
            raise ValueError(
                "The cores of a replica must form a box that tiles the slice. "
                f"Received: the layout '{layout}' for a slice of shape "
                f"{sides} in the dimensions x, y, z and core. Choose another "
                "number of cores."
            )
    if devices[0].platform == "tpu" or is_absent_gpu(devices[0]):
        return replica_meshes.make_abstract_mesh(devices, shape, partitioner)
    shards = getattr(partitioner, "shards", None)
    return ReplicaMesh(devices=tuple(devices), shards=shards)


def _call_maker(maker: Maker) -> keras.Model:
    try:
        model = maker()
        if isinstance(model, keras.Model) and model.compiled:
            return model
        raise TypeError(
            "The planned function must return a compiled Keras model. "
            f"Received: {model!r} of type {type(model).__name__}. Compile "
            "the model in the function, and return it."
        )
    except Exception as error:
        raise MakingFailed(str(error)) from error
