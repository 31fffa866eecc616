"""Initial values of variables: all processes use the chief's values.

Each process draws initial values itself, from a process-local random state. So
before variables are placed, the chief's values are sent to all processes.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.chief import broadcast
from keras_strategies._core.jaxprs.traces import is_tracing
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Shape

# A part of JAX's error message (tests/multi_process/test_startup.py).
_NOT_THE_SAME = "not the same on each process"
_CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


VariableCreator = Callable[..., keras.Variable]
"""A function of `next_creator` (if any) and the keywords of
`keras.Variable`."""


def create(
    mesh: ReplicaMesh, next_creator: VariableCreator, **kwargs: Any
) -> keras.Variable:
    """Creates a variable with the chief's initial value.

    Raises:
      ValueError: if the initial value is a number or an array that differs from
        the chief's.
    """
    if kwargs.get("layout") is None:
        kwargs |= {
            "initializer": make_chief_initializer(
                kwargs.get("initializer"), mesh
            )
        }
    try:
        return next_creator(**kwargs)
    except AssertionError as error:
        # JAX's `device_put` compares the values that it puts on the devices
        # of several processes.
        if _NOT_THE_SAME not in str(error):
            raise
        raise ValueError(
            "All processes must create a variable with the same initial value. "
            f"Received: {kwargs.get('initializer')!r} for variable "
            f"{kwargs.get('name')!r} in process {jax.process_index()}, and "
            "a different value in another process. Pass the same value (for "
            "example, the same learning rate) in all processes, or a function "
            "of (shape, dtype), whose result in the chief is sent to all."
        ) from error


def make_chief_initializer(initializer: Any, mesh: ReplicaMesh) -> Any:
    """Makes an initializer that returns the chief's value in all processes.

    Args:
      initializer: A function, the name of a Keras initializer, or a value.
      mesh: The mesh of the replicas.

    Returns:
      A function of shape and dtype, or `initializer` itself if the processes
      need not communicate.
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
    """An initializer that returns the chief's value in all processes.

    Attributes:
      initializer: The initializer that computes this process's value.
      mesh: The mesh of the replicas.
    """

    initializer: Callable[..., Any]
    mesh: ReplicaMesh

    def __call__(
        self, shape: Shape, dtype: str | None = None, **kwargs: Any
    ) -> Array:
        if not is_tracing():
            value = self.initializer(shape, dtype=dtype, **kwargs)
            return broadcast([value], self.mesh)[0]
        # Keras compiles the initializer of a large variable. All processes must
        # trace the same program, and no process should have to store the full
        # value. So the chief sends only the seed, if the initializer has one.
        seed = getattr(self.initializer, "seed", None)
        if isinstance(seed, int):
            seeded = copy.copy(self.initializer)
            seeded.seed = int(self._read_chief_value(np.int64(seed)))
            return seeded(shape, dtype=dtype, **kwargs)
        with jax.ensure_compile_time_eval():
            value = self.initializer(shape, dtype=dtype, **kwargs)
        return jax.numpy.asarray(self._read_chief_value(value))

    def _read_chief_value(self, value: Array) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            (array,) = broadcast([value], self.mesh)
            return np.asarray(array.addressable_data(0))
