"""TPU devices as JAX describes them, without a TPU."""

import dataclasses
import itertools
from typing import Any

import numpy as np

import keras_strategies as ks
from keras_strategies.tpu.replica_meshes import make_abstract_mesh


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What JAX says of one TPU core."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"


def make_slice(
    shape,
    host=(2, 2, 1),
    num_cores=1,
    kind="TPU v5 lite",
    slice_index=0,
    first_process=0,
):
    """The devices of a slice in JAX's order: process by process.

    Args:
      shape: The slice's chips in x, y and z.
      host: The chips of one process.
      num_cores: Cores of a chip.
      kind: JAX's name of the generation.
      slice_index: Which slice.
      first_process: The process of the first host.
    """
    hosts = [n // h for n, h in zip(shape, host, strict=True)]
    devices = []
    for z, y, x in itertools.product(*map(range, shape[::-1])):
        block = [c // h for c, h in zip((x, y, z), host, strict=True)]
        process = block[0] + hosts[0] * (block[1] + hosts[1] * block[2])
        chip = x + shape[0] * (y + shape[1] * z)
        devices += [
            Tpu(
                id=100000 * slice_index + chip * num_cores + core,
                process_index=first_process + process,
                coords=(x, y, z),
                core_on_chip=core,
                slice_index=slice_index,
                device_kind=kind,
            )
            for core in range(num_cores)
        ]
    return sorted(devices, key=lambda device: device.process_index)


def coordinates(mesh_shape, host=(2, 2, 1)) -> Any:
    """The coordinates of a whole mesh's devices, (tasks, devices, 4)."""
    devices = make_slice(mesh_shape[:3], host, mesh_shape[3])
    places = [(*d.coords, d.core_on_chip) for d in devices]
    num_tasks = devices[-1].process_index + 1
    return np.array(places).reshape(num_tasks, -1, 4)


def group_devices(devices, shards):
    """The devices of a mesh that shards variables, and its groups' size."""
    partitioner = ks.experimental.FullySharded(shards)
    mesh = make_abstract_mesh(devices, None, partitioner)
    return mesh.devices, mesh.shards
