"""Broadcast of the chief's arrays to all processes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh


def from_chief(values: Sequence[Any], mesh: ReplicaMesh) -> list[jax.Array]:
    """The chief's values on all devices. Collective.

    Args:
      values: What this process has; the chief's shapes and dtypes.
      mesh: The replicas.
    """

    def column(value: Any) -> jax.Array:
        host = np.asarray(value)[None]
        shape = (mesh.num_replicas, *host.shape[1:])
        return jax.make_array_from_callback(shape, mesh.split, lambda _: host)

    columns = [column(value) for value in values]
    return dispatch(mesh, _first_rows(mesh), columns)


@functools.cache
def _first_rows(mesh: ReplicaMesh) -> Any:
    return jax.jit(
        lambda columns: [column[0] for column in columns],
        out_shardings=mesh.whole,
    )
