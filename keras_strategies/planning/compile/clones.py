"""Creates clones of compiled models."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_strategies.planning.seam import (
    is_rematerialized,
    temporary_attribute,
)


def clone_from_config(model: keras.Model) -> keras.Model:
    """Clones a model from its config, and compiles the clone like the model.

    Args:
      model: A model that has a config.

    Returns:
      A model with new variables, which are initialized, not copied.

    Raises:
      ValueError: if the model has no config, or Keras cannot create a model
        from the config.
    """
    try:
        config = model.get_config()
        clone: Any = type(model).from_config(config)
        shape = None if clone.built else model.get_build_config()
        if shape:
            clone.build_from_config(shape)
        _copy_modes(model, clone)
        if model.compiled:
            compile_like(clone, model)
    except Exception as error:
        raise ValueError(
            "A planned model must be a model that Keras can create from its "
            f"config. Received: {model.name!r} of type {type(model).__name__}, "
            f"for which this failed ({type(error).__name__}: {error}). Pass a "
            "function that creates and compiles the model instead."
        ) from error
    return clone


def compile_like(clone: keras.Model, model: keras.Model) -> None:
    """Compiles a clone like the original model, with a new optimizer.

    The clone and the original share losses and metrics.
    """
    arguments = dict(model._compile_config.config)
    optimizer = model.optimizer
    if optimizer is not None:
        config = optimizer.get_config()
        arguments["optimizer"] = type(optimizer).from_config(config)
    arguments["auto_scale_loss"] = False
    clone.compile(**arguments)


def _copy_modes(model: keras.Model, clone: keras.Model) -> None:
    """Copies the layers' rematerialization modes; they are not in configs."""
    pairs = zip(model._flatten_layers(), clone._flatten_layers(), strict=True)
    for layer, other in pairs:
        other._remat_mode = layer._remat_mode


def has_remat_layers(model: keras.Model) -> bool:
    """Returns whether a layer is rematerialized (by `keras.RematScope`)."""
    return any(map(is_rematerialized, model._flatten_layers()))


@contextlib.contextmanager
def rematerialize(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Makes layers rematerialize their activations while the block runs.

    The layers behave as if they had been created in a `keras.RematScope`.
    """
    with keras.RematScope(mode="full"):
        mode = keras.layers.Identity()._remat_mode
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(temporary_attribute(layer, "_remat_mode", mode))
        yield
