"""Hashable signatures of layer calls, to find calls that compute the same."""

import json
from collections.abc import Callable, Hashable
from typing import Any

import keras

from keras_strategies._types import Tree

_KERAS = ("keras", "keras_hub")


def call_signature(node: Any) -> Hashable:
    """Returns a key for a layer call; calls that compute the same have one key.

    The converse need not be true: values of weights, floats and functions among
    the arguments, and arrays that a layer holds are left out. Loops over blocks
    compare the blocks' traces.

    Args:
      node: The call: a node in the graph of a Keras model.
    """
    operation, parts = node.operation, [node.operation]
    if isinstance(operation, keras.layers.Layer):
        parts = operation._flatten_layers()
    arguments = node.arguments.args, node.arguments.kwargs
    return (
        tuple(map(_describe_part, parts)),
        tuple(
            (tuple(v.shape), str(v.dtype), v.trainable)
            for v in getattr(operation, "variables", ())
        ),
        repr(keras.tree.map_structure(_describe_argument, arguments)),
        tuple(map(_read_spec, node.input_tensors)),
        tuple(map(_read_spec, node.output_tensors)),
    )


def is_of_keras(thing: type | Callable[..., object]) -> bool:
    """Returns whether a class or a function is defined by Keras."""
    return thing.__module__.split(".")[0] in _KERAS


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is rematerialized (by `keras.RematScope`)."""
    return _read_remat(layer) not in ((), (False,))


def _read_spec(tensor: keras.KerasTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _describe_argument(value: object) -> object:
    return value if isinstance(value, str | int | None) else type(value)


def _describe_part(part: Any) -> tuple[Any, ...]:
    """Describes an operation, or one of the layers inside of a layer."""
    attributes = {}
    if not is_of_keras(type(part)):
        # The config of a user-defined layer may be incomplete.
        of_keras = vars(keras.layers.Identity())
        attributes = {
            name: value
            for name, value in vars(part).items()
            if isinstance(value, str | int | float) and name not in of_keras
        }
    return (
        type(part),
        _read_config(part),
        tuple(sorted(attributes.items())),
        _read_remat(part),
    )


def _read_config(part: Any) -> str:
    """Returns an operation's config without names and initial values."""
    if hasattr(part, "operations"):
        # The config of a functional model contains those of its layers, and
        # refers to them by their names.
        return ""
    try:
        return json.dumps(_strip(part.get_config()), default=repr)
    except Exception:
        # A user-defined layer without a config.
        return ""


def _read_remat(part: Any) -> tuple[Any, ...]:
    """Returns the settings of rematerialization, or () if there are none."""
    remat = part._remat_mode
    if remat is None or remat.mode is None:
        return ()
    if remat.mode == "list_of_layers":
        return (part.name in remat.layer_names,)
    return remat.mode, remat.output_size_threshold


def _strip(config: Tree) -> Tree:
    """Returns a config without names, seeds and initializers."""
    if isinstance(config, dict):
        return {
            key: _strip(value)
            for key, value in config.items()
            if key not in ("name", "seed")
            and not str(key).endswith("initializer")
        }
    if isinstance(config, list | tuple):
        return [_strip(value) for value in config]
    return config
