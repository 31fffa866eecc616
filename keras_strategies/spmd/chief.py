"""Broadcasts the chief's arrays to all processes."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies._types import Array
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh


def broadcast(values: Sequence[Any], mesh: ReplicaMesh) -> list[jax.Array]:
    """Broadcasts the chief's arrays to all devices.

    All processes must call this function together.

    Args:
      values: This process's arrays. In every process they must have the same
        shapes and dtypes as in the chief; only the chief's contents are used.
      mesh: The replicas.

    Returns:
      The chief's arrays, replicated on all devices of the mesh.
    """
    split = _split(mesh)

    def column(value: Array) -> jax.Array:
        host = np.asarray(value)[None]
        shape = (split.num_devices, *host.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda _: host)

    columns = [column(value) for value in values]
    return dispatch(mesh, _first_rows(mesh), columns)


def place_from_chief(
    values: Sequence[Any], shardings: Sequence[Any], mesh: ReplicaMesh
) -> list[jax.Array]:
    """Sends the chief's arrays to all processes, and shards them if needed.

    All processes must call this function together.

    Args:
      values: See `broadcast`.
      shardings: The sharding of each result.
      mesh: The replicas.
    """
    is_replicated = [sharding is mesh.whole for sharding in shardings]
    sent = broadcast(list(itertools.compress(values, is_replicated)), mesh)
    placed = []
    for value, sharding in zip(values, shardings, strict=True):
        if sharding is mesh.whole:
            placed.append(sent.pop(0))
            continue
        divide = jax.jit(list, out_shardings=[sharding])
        placed += dispatch(mesh, divide, broadcast([value], mesh))
    return placed


def _split(mesh: ReplicaMesh) -> NamedSharding:
    """Returns the sharding that puts one row of an array on each device.

    The array has a row for each device, not for each replica, because the cores
    of one replica may belong to several processes. With one row per replica,
    these processes would all provide the same row.
    """
    if mesh.cores_per_replica == 1:
        return mesh.split
    devices = Mesh(np.array(mesh.devices, dtype=object), (mesh.axis,))
    return NamedSharding(devices, PartitionSpec(mesh.axis))


@functools.cache
def _first_rows(mesh: ReplicaMesh) -> Callable[..., list[jax.Array]]:
    return jax.jit(
        lambda columns: [column[0] for column in columns],
        out_shardings=mesh.whole,
    )
