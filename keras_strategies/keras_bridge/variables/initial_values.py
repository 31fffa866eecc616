"""Initial values of variables: the chief's, in all processes.

Each process draws the initial values of its variables itself, from a random
state of its own. Before they are placed, the chief's are sent to all.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.chief import from_chief
from keras_strategies._core.jaxprs.traces import is_traced
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Shape

# In what JAX raises (tests/multi_process/test_startup.py).
_NOT_THE_SAME = "not the same on each process"
_CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


VariableCreator = Callable[..., keras.Variable]
"""Of the keywords of `keras.Variable`; maybe of the next creator, too."""


def create(
    mesh: ReplicaMesh, next_creator: VariableCreator, **kwargs: Any
) -> keras.Variable:
    """A variable creator: initializers give the chief's value.

    Raises:
      ValueError: a number or an array that differs from the chief's.
    """
    if kwargs.get("layout") is None:
        kwargs |= {"initializer": alike(kwargs.get("initializer"), mesh)}
    try:
        return next_creator(**kwargs)
    except AssertionError as error:
        # JAX's `device_put` compares what it is to spread over processes.
        if _NOT_THE_SAME not in str(error):
            raise
        raise ValueError(
            "All processes must create a variable with the same value. "
            f"Received: {kwargs.get('initializer')!r} for variable "
            f"{kwargs.get('name')!r} in process {jax.process_index()}, and "
            "another value in another process. Give it the same number (a "
            "learning rate, for example) everywhere, or a function of "
            "(shape, dtype): the chief's result is sent to all."
        ) from error


def alike(initializer: Any, mesh: ReplicaMesh) -> Any:
    """An initializer that gives the chief's value on all processes.

    Args:
      initializer: A function, a name of Keras's, or a value, which stays.
      mesh: The replicas.

    Returns:
      A function of shape and dtype, or the value as given.
    """
    if mesh.num_processes == 1:
        return initializer
    if isinstance(initializer, str):
        initializer = keras.initializers.get(initializer)
    if not callable(initializer) or isinstance(
        initializer, (*_CONSTANTS, _FromChief)
    ):
        return initializer
    return _FromChief(initializer, mesh)


@dataclasses.dataclass(frozen=True, eq=False)
class _FromChief:
    """An initializer that gives the chief's value on all processes.

    Attributes:
      initializer: Gives this process's value.
      mesh: The replicas.
    """

    initializer: Callable[..., Any]
    mesh: ReplicaMesh

    def __call__(
        self, shape: Shape, dtype: str | None = None, **kwargs: Any
    ) -> Array:
        if not is_traced():
            value = self.initializer(shape, dtype=dtype, **kwargs)
            return from_chief([value], self.mesh)[0]
        # Keras compiles it, for a large variable: all processes must trace the
        # same, and none need hold the value.
        seed = getattr(self.initializer, "seed", None)
        if isinstance(seed, int):
            alike = copy.copy(self.initializer)
            alike.seed = int(self._of_chief(np.int64(seed)))
            return alike(shape, dtype=dtype, **kwargs)
        with jax.ensure_compile_time_eval():
            value = self.initializer(shape, dtype=dtype, **kwargs)
        return jax.numpy.asarray(self._of_chief(value))

    def _of_chief(self, value: Array) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            (array,) = from_chief([value], self.mesh)
            return np.asarray(array.addressable_data(0))
