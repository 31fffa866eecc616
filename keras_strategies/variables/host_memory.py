"""Moves between the memory of the host, which stores slots, and of devices.

JAX computes with arrays in the memory of the devices. Programs that take the
values of variables on the host move them there first, and back at the end. XLA
schedules the copies beside other work.
"""

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_strategies.variables.shardings import is_on_host

Variables = Sequence[keras.Variable]


def to_device(values: Sequence[Any], variables: Variables) -> list[Any]:
    """Moves the values of variables on the host to the devices.

    Args:
      values: Values in the order of the variables; None stands for no value.
      variables: The variables, on the host or on the devices.
    """
    return _move(values, variables, jax.memory.Space.Device)


def to_host(values: Sequence[Any], variables: Variables) -> list[Any]:
    """Moves the values of variables on the host back to it; see `to_device`."""
    return _move(values, variables, jax.memory.Space.Host)


def is_in_host_memory(value: Any) -> bool:
    """Returns whether an array of a trace is in the memory of the host."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def _move(
    values: Sequence[Any], variables: Variables, space: jax.memory.Space
) -> list[Any]:
    return [
        jax.device_put(value, space)
        if value is not None
        and is_on_host(variable)
        and jax.typeof(value).memory_space != space
        else value
        for value, variable in zip(values, variables, strict=True)
    ]
