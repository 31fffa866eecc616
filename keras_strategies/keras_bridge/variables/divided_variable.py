"""A variable that replicas of several processes divide, read as one array.

JAX gives a process the shards of its own devices alone. Keras reads variables
as arrays of numpy to save them and to return weights.
"""

from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import local_shards

_MESH = "_ks_mesh"


class DividedVariable(keras.Variable):
    """A variable whose array may be in several processes; made by `divide`."""

    def __array__(self, dtype: Any = None) -> np.ndarray:
        """The whole value. Collective, if no process has all shards."""
        value = self.value
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            return super().__array__(dtype)
        return np.asarray(_whole(value, getattr(self, _MESH)), dtype)


def divide(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Lets a variable be read as one array, where processes share it."""
    if mesh.num_processes > 1 and type(variable) is keras.Variable:
        variable.__class__ = DividedVariable
        setattr(variable, _MESH, mesh)


def undivide(variable: keras.Variable) -> None:
    """Makes a variable one of Keras's again."""
    if isinstance(variable, DividedVariable):
        delattr(variable, _MESH)
        variable.__class__ = keras.Variable


def _whole(array: jax.Array, mesh: ReplicaMesh) -> np.ndarray:
    parts = {str(index): (index, data) for index, data in local_shards(array)}
    if sum(data.size for _, data in parts.values()) == array.size:
        # Processes hold copies: their replicas are groups.
        found = np.empty(array.shape, array.dtype)
        for index, data in parts.values():
            found[index] = data
        return found
    gather = jax.jit(list, out_shardings=[mesh.whole])
    (whole,) = dispatch(mesh, gather, [array])
    return np.asarray(whole.addressable_data(0))
