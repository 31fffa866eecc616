"""Checks that TrainSpec, EvalSpec and Estimator share."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras_strategies._core.checks import check_number
from keras_strategies.cluster.addresses import shown


def check_input_fn(input_fn: Any) -> None:
    """Raises TypeError for an `input_fn` that cannot be called."""
    if not callable(input_fn):
        raise TypeError(
            f"`input_fn` must be callable. Received: {shown(input_fn)} of "
            f"type {type(input_fn).__name__}. Wrap the data: "
            "`input_fn=lambda: (features, labels)`."
        )


def check_positive(name: str, value: Any) -> None:
    """Raises unless a number of steps is None, or an integer above 0.

    Raises:
      TypeError: it is something else.
      ValueError: it is 0 or less.
    """
    cure = "Give 1 or more, or None for no limit."
    check_number(f"`{name}`", value, cure, above=0)


def check_seconds(name: str, value: Any) -> None:
    """Raises unless it is a number of seconds, 0 or more."""
    cure = "Give a number of seconds, 0 for none."
    check_number(
        f"`{name}`", value, cure, least=0, is_whole=False, is_optional=False
    )


def names_of_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names under which a function takes arguments, as tf finds them.

    Sees through `functools.partial`, whose given arguments are left out, and
    objects with `__call__`. `*args` and `**kwargs` are no names.
    """
    given: set[str] = set()
    if isinstance(function, functools.partial):
        # A keyword can be given again; whoever gave it means it to stay.
        given = {*function.keywords}
    kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds and name not in given
    )
