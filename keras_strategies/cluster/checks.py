"""Checks that users' arguments have the right types and are within bounds."""

import contextlib
import math
import operator
from collections.abc import Mapping
from numbers import Real
from types import UnionType
from typing import Any, SupportsIndex, cast

from keras_strategies.cluster.addresses import MAX_PORT, shorten

TIMEOUT = "KERAS_STRATEGIES_TIMEOUT_S"
"""The environment variable that limits waiting for other processes, in
seconds."""

_TIMEOUT_S = 600.0
Kind = type | UnionType | tuple[type, ...]


def check_number(
    name: str,
    value: object,
    fix: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    is_whole: bool = True,
    is_optional: bool = True,
) -> None:
    """Raises an error unless a value is a finite number within bounds.

    Args:
      name: The value's name, with which the error message begins.
      value: The value. NumPy's numbers are allowed; booleans are not.
      fix: The last sentence of the error message: what the user should do.
      minimum: The inclusive lower bound.
      above: The exclusive lower bound.
      maximum: The inclusive upper bound.
      is_whole: Whether the value must be an integer.
      is_optional: Whether None is allowed.

    Raises:
      TypeError: if the value is not a number, or not an integer if
        `is_whole`.
      ValueError: if it is out of bounds, infinite or NaN.
    """
    if value is None and is_optional:
        return
    number: Any = value
    # An array would be compared in its own dtype, whatever the bounds.
    with contextlib.suppress(TypeError):
        number = operator.index(cast(SupportsIndex, value))
    kind: Any = int if is_whole else Real
    if isinstance(value, bool) or not isinstance(number, kind):
        raise TypeError(
            f"{name} must be {'an integer' if is_whole else 'a number'}. "
            f"Received: {shorten(value)} of type {type(value).__name__}. {fix}"
        )
    for is_met, rule in (
        (is_whole or math.isfinite(number), "finite"),
        (minimum is None or number >= minimum, f">= {minimum}"),
        (above is None or number > above, f"> {above}"),
        (maximum is None or number <= maximum, f"<= {maximum}"),
    ):
        if not is_met:
            raise ValueError(
                f"{name} must be {rule}. Received: {shorten(value)}. {fix}"
            )


def check_type(
    name: str, value: object, kind: Kind, what: str, fix: str
) -> None:
    """Raises TypeError unless a value has a given type.

    Args:
      name: The value's name, with which the error message begins.
      value: The value.
      kind: The type or types, as for `isinstance`.
      what: The type in words, such as "a str".
      fix: The last sentence of the error message: what the user should do.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be {what}. Received: {shorten(value)} of type "
            f"{type(value).__name__}. {fix}"
        )


def check_port(port: int, name: str) -> int:
    """Returns a port if it is from 1 to 65535; otherwise raises an error.

    The errors are those of `check_number`.
    """
    fix = "Pass a port that is free on the hosts, such as 8888."
    check_number(
        name, port, fix, minimum=1, maximum=MAX_PORT, is_optional=False
    )
    return port


def read_timeout(environ: Mapping[str, str]) -> float:
    """Returns the longest wait for other processes, in seconds.

    Raises:
      ValueError: if the environment variable is not a positive number.
    """
    text = environ.get(TIMEOUT, str(_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"The environment variable {TIMEOUT} must be a positive number of "
            f"seconds. Received: {shorten(text)}. Unset it for the default of "
            f"{_TIMEOUT_S:.0f}."
        )
    return seconds
