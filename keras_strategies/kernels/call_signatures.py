"""Hashable signatures of layer calls, to find calls that compute the same."""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import keras

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
    policy = getattr(part, "dtype_policy", None)
    # A config would do as well, but it is incomplete for some user-defined
    # layers, and Keras imports TensorFlow to make one, which takes seconds.
    return (
        type(part),
        getattr(policy, "name", None),
        _describe_attributes(part),
        _read_remat(part),
    )


def _describe_attributes(thing: object) -> tuple[tuple[str, object], ...]:
    # Functional models refer to their layers, which are described, by names.
    attributes = {} if hasattr(thing, "operations") else vars(thing)
    return tuple(
        (name, _describe_value(value))
        for name, value in sorted(attributes.items())
        if name not in _attributes_of_all()
        and name != "seed"
        and not name.endswith("initializer")
    )


@functools.cache
def _attributes_of_all() -> frozenset[str]:
    """Returns the names of the attributes that every layer has."""
    return frozenset(vars(keras.layers.Identity(name="identity")))


def _describe_value(value: object) -> Hashable:
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_describe_value, value))
    if isinstance(value, types.FunctionType):
        return value.__module__, value.__qualname__
    if isinstance(value, keras.Regularizer | keras.constraints.Constraint):
        return type(value), _describe_attributes(value)
    return type(value)


def _read_remat(part: Any) -> tuple[Any, ...]:
    """Returns the settings of rematerialization, or () if there are none."""
    remat = part._remat_mode
    if remat is None or remat.mode is None:
        return ()
    if remat.mode == "list_of_layers":
        return (part.name in remat.layer_names,)
    return remat.mode, remat.output_size_threshold
