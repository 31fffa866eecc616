"""Models like another one, compiled as it is, without a variable of its."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_strategies._core.attributes import temporary_attribute
from keras_strategies.planning.compile.call_signatures import (
    is_of_keras,
    is_rematerialized,
)
from keras_strategies.planning.compile.equal_blocks import (
    Blocks,
    shortened,
)

_OF_A_STEP = ("train_step", "compute_loss", "compute_metrics", "compile")


def clone_from_config(model: keras.Model) -> keras.Model:
    """A model made from another one's config, compiled likewise.

    Args:
      model: A model of which Keras knows a config.

    Returns:
      One with variables of its own, and initial values.

    Raises:
      ValueError: there is no config, or Keras cannot make a model from it.
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
            "A model is planned by one that is made from its config. "
            f"Received: {model.name!r} of type {type(model).__name__}, of "
            f"which Keras makes none ({type(error).__name__}: {error}). Pass a "
            "function that makes and compiles the model instead."
        ) from error
    return clone


def compile_like(clone: keras.Model, model: keras.Model) -> None:
    """Compiles a model as another one is, with an optimizer of its own.

    Losses and metrics are the same objects.
    """
    arguments = dict(model._compile_config.config)
    optimizer = model.optimizer
    if optimizer is not None:
        config = optimizer.get_config()
        arguments["optimizer"] = type(optimizer).from_config(config)
    arguments["auto_scale_loss"] = False
    clone.compile(**arguments)


def has_own_step(model: keras.Model) -> bool:
    """Whether a model's class has methods of a step that are not Keras's."""
    return any(_has_own(type(model), name) for name in _OF_A_STEP)


def accumulates(model: keras.Model) -> bool:
    """Whether a model's optimizer updates after several steps.

    What its branch needs does not grow as its blocks do.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def shorter_clone(
    model: keras.Model, blocks: Blocks, number: int
) -> keras.Model:
    """A compiled model of the same layers with fewer blocks."""
    shorter = shortened(model, blocks, number)
    compile_like(shorter, model)
    return shorter


def _has_own(kind: type, name: str) -> bool:
    method = getattr(kind, name, None)
    return method is not None and not is_of_keras(method)


def _copy_modes(model: keras.Model, clone: keras.Model) -> None:
    """Has the layers computed again in the backward pass as the model's are.

    No config says so.
    """
    pairs = zip(model._flatten_layers(), clone._flatten_layers(), strict=True)
    for layer, other in pairs:
        other._remat_mode = layer._remat_mode


def has_rematerialized(model: keras.Model) -> bool:
    """Whether a layer is computed again, by a `keras.RematScope`."""
    return any(map(is_rematerialized, model._flatten_layers()))


@contextlib.contextmanager
def rematerialized(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """In which layers are as if made in a `keras.RematScope`."""
    with keras.RematScope(mode="full"):
        mode = keras.layers.Identity()._remat_mode
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(temporary_attribute(layer, "_remat_mode", mode))
        yield


def embeds_tokens(model: keras.Model) -> bool:
    """Whether a layer is an embedding, so that integers may be tokens."""
    return any(
        isinstance(layer, keras.layers.Embedding)
        or "embedding" in type(layer).__name__.lower()
        for layer in model._flatten_layers()
    )
