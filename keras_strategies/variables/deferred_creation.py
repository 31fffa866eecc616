"""Variables that have no value: in a trace, or while a fit runs.

Variables that are created in a trace get their values after the trace. While
Keras's `fit` runs, the values of a model's variables are in the state that it
passes from step to step, and the variables themselves may have no values.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies.variables.abstract_variables import (
    refuse_abstract,
)
from keras_strategies.variables.variable_creator import (
    variable_creator_scope,
)

models_in_loops: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
"""Models whose values may be in the state that a running `fit` passes on."""


@contextlib.contextmanager
def defer_creation() -> Iterator[None]:
    """Allows a trace to create variables, which get their values afterwards.

    Keras can initialize a variable later only if it has an initializer, so a
    plain value is wrapped in an initializer.
    """

    def create(
        next_creator: Callable[..., keras.Variable], **kwargs: Any
    ) -> keras.Variable:
        initializer = kwargs["initializer"]
        if not callable(initializer) and not isinstance(initializer, str):
            value = np.asarray(initializer, kwargs.get("dtype"))
            if value.dtype == np.float64:
                value = value.astype(keras.config.floatx())
            kwargs |= {
                "initializer": lambda shape, dtype: jnp.asarray(value, dtype),
                "shape": value.shape,
                "dtype": kwargs.get("dtype") or str(value.dtype),
            }
        return next_creator(**kwargs)

    with variable_creator_scope(create):
        yield


def sync_fits(variables: Sequence[keras.Variable]) -> None:
    """Writes values from the state of a running fit back to the variables.

    Does nothing if all the variables have values.

    Raises:
      RuntimeError: if a variable was created in `ks.abstract()` and has no
        value.
    """
    if any(v._value is None for v in variables):
        sync_all_fits()
        refuse_abstract(variables)


def sync_all_fits() -> None:
    """Writes the values from the states of running fits back to variables."""
    for model in list(models_in_loops):
        if any(v._value is None for v in model.variables):
            model.jax_state_sync()
