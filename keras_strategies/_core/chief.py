"""Broadcast of the chief's arrays to all processes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array


def broadcast(values: Sequence[Any], mesh: ReplicaMesh) -> list[jax.Array]:
    """Broadcasts the chief's values to all devices. Collective.

    Args:
      values: This process's values, with the shapes and dtypes of the chief's.
      mesh: The replicas.
    """
    split = _split(mesh)

    def column(value: Array) -> jax.Array:
        host = np.asarray(value)[None]
        shape = (split.num_devices, *host.shape[1:])
        return jax.make_array_from_callback(shape, split, lambda _: host)

    columns = [column(value) for value in values]
    return dispatch(mesh, _first_rows(mesh), columns)


def _split(mesh: ReplicaMesh) -> NamedSharding:
    """Returns the sharding of an array with one row for each device.

    One row for each replica would not do: if several processes have cores of
    one replica, each of them would provide the same row.
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
