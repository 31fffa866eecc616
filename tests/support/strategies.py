"""Strategies by the names that tests' ids have."""

import functools
from collections.abc import Callable
from typing import Any

import jax

import keras_strategies as ks
from keras_strategies.experimental import FullySharded, SlotsOnly

SHARDED = (
    *("sharded2", "sharded3", "sharded8"),
    *("sharded8_in_groups_of_2", "sharded8_in_groups_of_4"),
)


def make_strategy(name: str, layout_map: Any = None) -> ks.Strategy:
    """The strategy of a name; `layout_map` is for replicas of several cores."""
    make = _STRATEGIES[name]
    return make() if layout_map is None else make(layout_map=layout_map)


def cores_strategy(
    replicas: int,
    cores: int,
    layout_map: Any = None,
    partitioner: Any = None,
    **options: Any,
) -> ks.Strategy:
    """Replicas of several cores."""
    topology = ks.tpu.experimental.Topology.from_devices(
        take_devices(replicas * cores)
    )
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, [cores, 1, 1, 1], num_replicas=replicas
    )
    return ks.TPUStrategy(
        device_assignment=assignment,
        layout_map=layout_map,
        variable_partitioner=partitioner,
        **options,
    )


def _mirrored(replicas: int, partitioner: Any = None) -> ks.Strategy:
    devices = take_devices(replicas)
    return ks.MirroredStrategy(devices, variable_partitioner=partitioner)


def take_devices(count: int) -> list[jax.Device]:
    """The first devices; of CPUs, if there are fewer GPUs."""
    devices = jax.devices()
    return (devices if len(devices) >= count else jax.devices("cpu"))[:count]


def _sharded_cores(
    replicas: int, cores: int, partitioner: Any, layout_map: Any = None
) -> ks.Strategy:
    """All is sharded over the cores, and by a partitioner over the replicas."""
    layout_map = layout_map or {".*dense.*/kernel": (None, "model")}
    return cores_strategy(replicas, cores, layout_map, partitioner)


def _table() -> dict[str, Callable[..., ks.Strategy]]:
    """A number after a kind is that of the replicas."""
    of = functools.partial
    every = FullySharded(min_size=1)
    in_twos = FullySharded(2, min_size=1)
    in_fours = FullySharded(4, min_size=1)
    slots = SlotsOnly(min_size=1)
    return {
        "one": of(ks.OneDeviceStrategy, "cpu:1"),
        "tpu": ks.TPUStrategy,
        **{f"mirrored{n}": of(_mirrored, n) for n in (1, 2, 3, 4, 8)},
        **{f"sharded{n}": of(_mirrored, n, every) for n in (1, 2, 3, 4, 8)},
        "sharded8_in_groups_of_2": of(_mirrored, 8, in_twos),
        "sharded8_in_groups_of_4": of(_mirrored, 8, in_fours),
        "sharded_slots4": of(_mirrored, 4, slots),
        "tpu1_of_4_cores": of(cores_strategy, 1, 4),
        "tpu2_of_2_cores": of(cores_strategy, 2, 2),
        "tpu4_of_2_cores": of(cores_strategy, 4, 2),
        "sharded2_of_2_cores": of(_sharded_cores, 2, 2, every),
        "sharded2_of_4_cores": of(_sharded_cores, 2, 4, every),
        "sharded4_of_2_cores": of(_sharded_cores, 4, 2, every),
        "sharded4_of_2_cores_in_groups_of_2": of(_sharded_cores, 4, 2, in_twos),
        "sharded_slots2_of_2_cores": of(_sharded_cores, 2, 2, slots),
    }


_STRATEGIES = _table()
