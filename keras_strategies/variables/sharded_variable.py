"""Variables whose values are sharded, and read as one array."""

from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_strategies._types import Array
from keras_strategies.cluster.exchange import same_variables
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.values import local_shards
from keras_strategies.variables.initial_values import (
    name_initializer,
    note_existing,
    place,
)

PLACEMENT = "_ks_placement"
"""The attribute of a variable that has its placement."""

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


class ShardedVariable(keras.Variable):
    """A variable whose value is sharded; see `make_sharded`."""

    def __array__(self, dtype: "DTypeLike | None" = None) -> np.ndarray:
        """Returns the full value. Collective if no process has all shards."""
        value = self.value
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            return super().__array__(dtype)
        mesh: ReplicaMesh = getattr(self, PLACEMENT).mesh
        return np.asarray(_gather(value, mesh), dtype)

    def assign(self, value: Any) -> Array:
        """Assigns a value. Collective if no process has all shards.

        Of an array on the host, each device gets its shard only.
        """
        is_host = isinstance(value, np.ndarray) and value.shape == self.shape
        layout: Any = self._layout
        if is_host and layout is not None and get_stateless_scope() is None:
            mesh: ReplicaMesh = getattr(self, PLACEMENT).mesh
            full = value.astype(jax.numpy.dtype(self._dtype), copy=False)
            if mesh.num_processes > 1:
                note_existing(mesh, self, name_initializer(full))
                same_variables.compare(mesh.processes)
            # Frees the old shards before the new ones are stored.
            self._value = None
            value = place(full, layout)
        return super().assign(value)


def make_sharded(variable: keras.Variable) -> None:
    """Makes a variable that is sharded readable as one NumPy array."""
    is_plain = type(variable) is keras.Variable
    if is_plain and any(getattr(variable, PLACEMENT).slot_sharding.spec):
        variable.__class__ = ShardedVariable


def make_plain(variable: keras.Variable) -> None:
    """Makes a variable a plain Keras variable again."""
    if isinstance(variable, ShardedVariable):
        variable.__class__ = keras.Variable


def _gather(array: jax.Array, mesh: ReplicaMesh) -> np.ndarray:
    parts = {str(index): (index, data) for index, data in local_shards(array)}
    if sum(data.size for _, data in parts.values()) == array.size:
        # This process has a complete copy.
        full = np.empty(array.shape, array.dtype)
        for index, data in parts.values():
            full[index] = data
        return full
    gather = jax.jit(_move_to_devices, out_shardings=[mesh.whole])
    (replicated,) = dispatch(mesh, gather, [array])
    return np.asarray(replicated.addressable_data(0))


def _move_to_devices(arrays: list[jax.Array]) -> list[jax.Array]:
    # Slots may be on the host.
    return jax.device_put(arrays, jax.memory.Space.Device)
