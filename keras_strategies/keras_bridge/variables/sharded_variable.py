"""A variable that replicas divide, read as one array of numpy.

Keras reads variables so to save them and to return weights. JAX would keep the
whole array on the host for as long as the variable has the value, and gives a
process the shards of its own devices alone.
"""

from typing import TYPE_CHECKING

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import local_shards

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_MESH = "_ks_mesh"


class ShardedVariable(keras.Variable):
    """A variable whose value is divided; made by `divide`."""

    def __array__(self, dtype: "DTypeLike | None" = None) -> np.ndarray:
        """The whole value. Collective, if no process has all shards."""
        value = self.value
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            return super().__array__(dtype)
        return np.asarray(_whole(value, getattr(self, _MESH)), dtype)


def make_sharded(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Lets a variable be read as one array."""
    if type(variable) is keras.Variable:
        variable.__class__ = ShardedVariable
        setattr(variable, _MESH, mesh)


def make_plain(variable: keras.Variable) -> None:
    """Makes a variable one of Keras's again."""
    if isinstance(variable, ShardedVariable):
        delattr(variable, _MESH)
        variable.__class__ = keras.Variable


def _whole(array: jax.Array, mesh: ReplicaMesh) -> np.ndarray:
    parts = {str(index): (index, data) for index, data in local_shards(array)}
    if sum(data.size for _, data in parts.values()) == array.size:
        # This process has a whole copy.
        found = np.empty(array.shape, array.dtype)
        for index, data in parts.values():
            found[index] = data
        return found
    gather = jax.jit(list, out_shardings=[mesh.whole])
    (whole,) = dispatch(mesh, gather, [array])
    return np.asarray(whole.addressable_data(0))
