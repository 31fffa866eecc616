"""A sharded variable that can be read as one NumPy array.

Keras converts variables to NumPy arrays to save them and to return weights. JAX
itself would cache the full array on the host for as long as the variable has
this value, and could not read shards on the devices of other processes.
"""

from typing import TYPE_CHECKING

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.values import local_shards

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_MESH = "_ks_mesh"


class ShardedVariable(keras.Variable):
    """A variable whose value is sharded; see `make_sharded`."""

    def __array__(self, dtype: "DTypeLike | None" = None) -> np.ndarray:
        """Returns the full value. Collective if no process has all shards."""
        value = self.value
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            return super().__array__(dtype)
        return np.asarray(_gather(value, getattr(self, _MESH)), dtype)


def make_sharded(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Makes a sharded variable readable as one NumPy array."""
    if type(variable) is keras.Variable:
        variable.__class__ = ShardedVariable
        setattr(variable, _MESH, mesh)


def make_plain(variable: keras.Variable) -> None:
    """Makes a variable a plain Keras variable again."""
    if isinstance(variable, ShardedVariable):
        delattr(variable, _MESH)
        variable.__class__ = keras.Variable


def _gather(array: jax.Array, mesh: ReplicaMesh) -> np.ndarray:
    parts = {str(index): (index, data) for index, data in local_shards(array)}
    if sum(data.size for _, data in parts.values()) == array.size:
        # This process has a complete copy.
        full = np.empty(array.shape, array.dtype)
        for index, data in parts.values():
            full[index] = data
        return full
    gather = jax.jit(list, out_shardings=[mesh.whole])
    (replicated,) = dispatch(mesh, gather, [array])
    return np.asarray(replicated.addressable_data(0))
