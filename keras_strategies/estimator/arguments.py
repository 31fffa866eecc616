"""Argument checks that Estimator, its specs and its hooks share."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.estimator.seam import (
    check_number,
    check_type,
    shorten,
)

_METHODS = ("begin", "before_save", "after_save", "end")
_CALLBACKS = (
    "Hooks into sessions are not supported. docs/estimator.md lists the "
    "callback to use instead of each hook of TensorFlow."
)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless an argument is an instance of a class."""
    public = f"ks.estimator.{kind.__name__}"
    fix = f"Create one: `{public}(...)`."
    check_type(f"`{name}`", value, kind, f"a `{public}`", fix)


def check_input_fn(input_fn: object) -> None:
    """Raises TypeError unless an `input_fn` is callable."""
    if not callable(input_fn):
        raise TypeError(
            f"`input_fn` must be callable. Received: {shorten(input_fn)} of "
            f"type {type(input_fn).__name__}. Wrap the data: "
            "`input_fn=lambda: (features, labels)`."
        )


def check_positive(name: str, value: object) -> None:
    """Raises an error unless a value is None or a positive integer.

    Raises:
      TypeError: if `value` is neither an integer nor None.
      ValueError: if `value` is 0 or less.
    """
    fix = "Pass 1 or more, or None for no limit."
    check_number(f"`{name}`", value, fix, above=0)


def check_seconds(name: str, value: object) -> None:
    """Raises an error unless a value is a non-negative number of seconds."""
    fix = "Pass a number of seconds, 0 or more."
    check_number(
        f"`{name}`", value, fix, minimum=0, is_whole=False, is_optional=False
    )


def check_name(name: str | None) -> None:
    """Raises an error unless a directory can be named after an evaluation.

    Raises:
      TypeError: if `name` is neither a str nor None.
      ValueError: if `name` contains a path separator or a null character, or is
        "." or "..".
    """
    fix = "Pass a name, such as 'test'."
    check_type("`name`", name, str | None, "a str", fix)
    if set(name or "") & set("/\\\0") or name in (".", ".."):
        raise ValueError(
            "`name` must be a valid part of a directory's name. Received: "
            f"{shorten(name)}. {fix}"
        )


def check_hooks(hooks: object, name: str = "hooks") -> tuple[Any, ...]:
    """Checks hooks and returns them as a tuple.

    Args:
      hooks: Keras callbacks, or None.
      name: The argument's name, for the error message.

    Raises:
      TypeError: if a hook is not a Keras callback.
    """
    checked = _as_tuple(hooks, name)
    for hook in checked:
        import keras

        kind, what = keras.callbacks.Callback, "Keras callbacks"
        check_type(f"`{name}`", hook, kind, what, _CALLBACKS)
    return checked


def check_listeners(listeners: object) -> tuple[Any, ...]:
    """Checks saving listeners and returns them as a tuple.

    Args:
      listeners: Objects with the methods `begin`, `before_save`, `after_save`
        and `end`, like a `CheckpointSaverListener`; or None.

    Raises:
      TypeError: if one of these methods is missing from a listener, or if a
        listener is a class instead of an object.
    """
    checked = _as_tuple(listeners, "saving_listeners")
    for listener in checked:
        methods = [getattr(listener, name, None) for name in _METHODS]
        if isinstance(listener, type) or not all(map(callable, methods)):
            raise TypeError(
                "`saving_listeners` must be objects with the methods "
                f"{', '.join(_METHODS)}. Received: {shorten(listener)}. Pass "
                "an instance of a subclass of "
                "`ks.estimator.CheckpointSaverListener`."
            )
    return checked


def find_argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's arguments, as TensorFlow does.

    The names do not include `*args`, `**kwargs`, or arguments that a
    `functools.partial` sets. Objects with `__call__` are supported.
    """
    set_by_partial: set[str] = set()
    if isinstance(function, functools.partial):
        # `inspect.signature` includes the keyword arguments of a partial,
        # because a caller may override them. An Estimator must not do so.
        set_by_partial = {*function.keywords}
    kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds and name not in set_by_partial
    )


def _as_tuple(values: object, name: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"`{name}` must be a list. Received: {shorten(values)} of type "
            f"{type(values).__name__}. Pass a list, such as [{name[:-1]}]."
        )
    return tuple(values)
