"""Initial values of variables: the chief's, in all processes.

Each process draws the initial values of its variables itself, from a random
state of its own. Before they are placed, the chief's are sent to all.
"""

from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.core import Tracer

from keras_strategies._core.chief import from_chief
from keras_strategies._core.mesh import ReplicaMesh

# In what JAX raises (tests/multi_process/test_startup.py).
_NOT_THE_SAME = "not the same on each process"
_CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


def create(
    mesh: ReplicaMesh,
    next_creator: Callable[..., keras.Variable],
    **kwargs: Any,
) -> keras.Variable:
    """A variable creator: initializers give the chief's value.

    Args:
      mesh: The replicas.
      next_creator: Makes the variable.
      **kwargs: Those of `keras.Variable`.

    Raises:
      ValueError: a number or an array that differs from the chief's.
    """
    initializer = kwargs.get("initializer")
    if mesh.num_processes > 1 and kwargs.get("layout") is None:
        if isinstance(initializer, str):
            initializer = keras.initializers.get(initializer)
        if callable(initializer) and not isinstance(initializer, _CONSTANTS):
            kwargs |= {"initializer": _from_chief(initializer, mesh)}
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


def _from_chief(initializer: Any, mesh: ReplicaMesh) -> Any:
    """An initializer that gives the chief's value on all processes."""

    def initial(shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        value = initializer(shape, dtype=dtype, **kwargs)
        is_traced = isinstance(value, Tracer)
        return value if is_traced else from_chief([value], mesh)[0]

    return initial
