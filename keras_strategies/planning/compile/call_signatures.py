"""Kinds of calls: those of one kind compute the same."""

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
    """What is equal for calls in a model's graph that compute the same.

    Args:
      node: The call, as Keras keeps it.
    """
    return (
        _kind_of(node.operation),
        _arguments_of(node),
        tuple(map(_spec, node.input_tensors)),
        tuple(map(_spec, node.output_tensors)),
    )


def is_of_keras(thing: type | Callable[..., object]) -> bool:
    """Whether a class or a function is Keras's own."""
    return thing.__module__.split(".")[0] in _KERAS


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Whether a layer is computed again, by a `keras.RematScope`."""
    return _remat_of(layer) not in ((), (False,))


def _spec(tensor: keras.KerasTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _kind_of(operation: keras.Operation) -> tuple[Any, ...]:
    variables = tuple(
        (tuple(v.shape), str(v.dtype), v.trainable)
        for v in getattr(operation, "variables", ())
    )
    text, modes = _config_of(operation), ()
    if isinstance(operation, keras.layers.Layer):
        inner = operation._flatten_layers()
        modes = tuple(map(_remat_of, inner))
        if not all(is_of_keras(type(x)) for x in inner):
            # Configs of somebody's layers may say less than they do.
            text += "".join(map(_config_of, inner))
            modes += tuple(map(_attributes_of, inner))
        # A functional model's config has names in its graph.
        named = [(x, *getattr(x, "operations", ())) for x in inner]
        names = dict.fromkeys(x.name for group in named for x in group)
        for number, name in enumerate(names):
            # As a value: a first `Dropout` is called as the key "dropout" is.
            word = re.escape(json.dumps(name)) + "(?!:)"
            text = re.sub(word, f'"part {number}"', text)
    return type(operation), variables, text, modes


def _config_of(operation: keras.Operation) -> str:
    try:
        config = _nameless(operation.get_config())
        return json.dumps(config, sort_keys=True, default=repr)
    except Exception:
        # Somebody's layer has none: its attributes tell.
        return ""


def _attributes_of(layer: keras.layers.Layer) -> tuple[Any, ...]:
    """What a layer of somebody's holds besides layers and variables."""
    if is_of_keras(type(layer)):
        return ()
    of_all = vars(keras.layers.Identity())
    return tuple(
        (name, _value_of(value))
        for name, value in sorted(vars(layer).items())
        if name not in of_all
    )


def _arguments_of(node: Any) -> Hashable:
    """What a call is given besides tensors.

    Numbers that an operation of Keras computes with are as good as others.
    """
    is_layer = isinstance(node.operation, keras.layers.Layer)
    given = node.arguments.args, node.arguments.kwargs
    return _value_of(given, has_numbers=is_layer)


def _value_of(value: Any, *, has_numbers: bool = True) -> Hashable:
    """A value that is equal for equal ones, and has a hash."""

    def of(item: object) -> Hashable:
        return _value_of(item, has_numbers=has_numbers)

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
        captured = map(_captured, value.__closure__ or ())
        return value.__code__, of(value.__defaults__), tuple(captured)
    return _hashed(value)


def _captured(cell: types.CellType) -> Hashable:
    """What a function has from where it was made. It may be itself."""
    try:
        return _hashed(cell.cell_contents)
    except ValueError:
        return None


def _hashed(value: object) -> Hashable:
    is_plain = isinstance(value, str | int | float | None)
    if not is_plain and is_of_keras(type(value)):
        # Layers are looked at by themselves.
        return type(value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def _remat_of(layer: keras.layers.Layer) -> tuple[Any, ...]:
    """How a layer is computed again in the backward pass."""
    remat = layer._remat_mode
    if remat is None or remat.mode is None:
        return ()
    if remat.mode == "list_of_layers":
        return (layer.name in remat.layer_names,)
    return remat.mode, remat.output_size_threshold


def _nameless(config: Tree) -> Tree:
    if isinstance(config, dict):
        return {k: _nameless(v) for k, v in config.items() if k != "name"}
    if isinstance(config, list | tuple):
        return [_nameless(v) for v in config]
    return config
