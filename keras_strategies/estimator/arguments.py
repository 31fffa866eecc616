"""Argument checks that Estimator, its specs and its hooks share."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_strategies.estimator.seam import (
    check_number,
    check_type,
    shorten,
)

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
    kind = keras.callbacks.Callback
    return check_items(name, hooks, kind, "Keras callbacks", _CALLBACKS)


def check_items(
    name: str, values: object, kind: type, what: str, fix: str
) -> tuple[Any, ...]:
    """Checks the types of an argument's items, and returns them as a tuple.

    Args:
      name: The argument's name.
      values: An iterable of the items, or None.
      kind: The type of the items.
      what: The type in words, in the plural.
      fix: The last sentence of the error message: what the user should do.

    Raises:
      TypeError: if an item has another type.
    """
    check_type(f"`{name}`", values, Iterable | None, "a list", fix)
    items: Any = () if values is None else values
    checked = tuple(items)
    for item in checked:
        check_type(f"`{name}`", item, kind, what, fix)
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
