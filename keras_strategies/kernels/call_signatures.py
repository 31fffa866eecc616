"""Hashable signatures of layer calls, to find calls that compute the same."""

import inspect
import json
import re
import types
from collections.abc import Callable, Hashable
from typing import Any

import keras

from keras_strategies._types import Tree

_KERAS = ("keras", "keras_hub")


def call_signature(node: Any) -> tuple[Any, ...]:
    """Returns a key for a layer call; equal keys mean equal computations.

    The values of weights may differ.

    Args:
      node: The call: a node in the graph of a Keras model.
    """
    return (
        _describe_operation(node.operation),
        _read_arguments(node),
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


def _describe_operation(operation: keras.Operation) -> tuple[Any, ...]:
    variables = tuple(
        (tuple(v.shape), str(v.dtype), v.trainable)
        for v in getattr(operation, "variables", ())
    )
    text, modes = _read_config(operation), ()
    if isinstance(operation, keras.layers.Layer):
        inner = operation._flatten_layers()
        modes = tuple(map(_read_remat, inner))
        if not all(is_of_keras(type(x)) for x in inner):
            # The config of a user-defined layer may be incomplete, so the
            # signature also includes all inner layers and attributes.
            text += "".join(map(_read_config, inner))
            modes += tuple(map(_read_attributes, inner))
        # The config of a functional model refers to layers by name. The names
        # differ between equal blocks, so they are replaced by numbers.
        named = [(x, *getattr(x, "operations", ())) for x in inner]
        names = dict.fromkeys(x.name for group in named for x in group)
        for number, name in enumerate(names):
            # Only values are replaced: the key "dropout" is not a reference to
            # a layer named `dropout`.
            word = re.escape(json.dumps(name)) + "(?!:)"
            text = re.sub(word, f'"part {number}"', text)
    return type(operation), variables, text, modes


def _read_config(operation: keras.Operation) -> str:
    try:
        config = _strip(operation.get_config(), is_of_keras(type(operation)))
        return json.dumps(config, sort_keys=True, default=repr)
    except Exception:
        # A user-defined layer without a config. Its attributes are compared
        # instead.
        return ""


def _read_attributes(layer: keras.layers.Layer) -> tuple[Any, ...]:
    """Returns a user-defined layer's attributes, except those set by Keras."""
    if is_of_keras(type(layer)):
        return ()
    default_names = vars(keras.layers.Identity())
    return tuple(
        (name, _make_key(value))
        for name, value in sorted(vars(layer).items())
        if name not in default_names
    )


def _read_arguments(node: Any) -> Hashable:
    """Returns a hashable key for a call's arguments that are not tensors.

    Float arguments of a Keras operation (not a layer) are left out, because
    their values do not change which operations are computed.
    """
    is_layer = isinstance(node.operation, keras.layers.Layer)
    given = node.arguments.args, node.arguments.kwargs
    return _make_key(given, has_numbers=is_layer)


def _make_key(value: Any, *, has_numbers: bool = True) -> Hashable:
    """Returns a hashable key that is equal for equivalent values."""

    def of(item: object) -> Hashable:
        return _make_key(item, has_numbers=has_numbers)

    if isinstance(value, dict):
        return tuple((str(k), of(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(of, value))
    if isinstance(value, float):
        return value if has_numbers else float
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return str(value.shape), str(value.dtype)
    if inspect.ismethod(value):
        return value.__func__
    if inspect.isfunction(value):
        captured = map(_make_cell_key, value.__closure__ or ())
        return value.__code__, of(value.__defaults__), tuple(captured)
    return _make_leaf_key(value)


def _make_cell_key(cell: types.CellType) -> Hashable:
    """Returns a key for the contents of a closure's cell, or None if empty.

    The contents of the cell are not traversed, because they may be the function
    itself.
    """
    try:
        return _make_leaf_key(cell.cell_contents)
    except ValueError:
        return None


def _make_leaf_key(value: object) -> Hashable:
    is_plain = isinstance(value, str | int | float | None)
    if not is_plain and is_of_keras(type(value)):
        # Inner layers are handled in `_describe_operation`.
        return type(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def _read_remat(layer: keras.layers.Layer) -> tuple[Any, ...]:
    """Returns a layer's rematerialization settings, or () if it has none."""
    remat = layer._remat_mode
    if remat is None or remat.mode is None:
        return ()
    if remat.mode == "list_of_layers":
        return (layer.name in remat.layer_names,)
    return remat.mode, remat.output_size_threshold


def _strip(config: Tree, is_of_keras: bool) -> Tree:
    """Returns a config without names and, for Keras's layers, initial values.

    A seed or an initializer of Keras's layers determines only values of
    variables.
    """
    if isinstance(config, dict):
        return {
            key: _strip(value, is_of_keras)
            for key, value in config.items()
            if key != "name" and not (is_of_keras and _is_initial(key))
        }
    if isinstance(config, list | tuple):
        return [_strip(value, is_of_keras) for value in config]
    return config


def _is_initial(key: object) -> bool:
    return key == "seed" or str(key).endswith("initializer")
