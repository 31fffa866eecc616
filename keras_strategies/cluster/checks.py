"""The checks of numbers and types that users give."""

import math
import numbers
from types import UnionType
from typing import Any

from keras_strategies.cluster.addresses import MAX_PORT, shown

Kind = type | UnionType | tuple[type, ...]


def check_number(
    name: str,
    value: object,
    cure: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    is_whole: bool = True,
    is_optional: bool = True,
) -> None:
    """Raises unless a value is a finite number within bounds.

    Args:
      name: What it is, for the error, which begins with it.
      value: What was given. numpy's numbers are numbers, booleans are none.
      cure: The last sentence of the error.
      least: It is this or more.
      above: It is more than this.
      most: It is this or less.
      is_whole: Whether it is an integer.
      is_optional: Whether None is allowed.

    Raises:
      TypeError: it is not such a number.
      ValueError: it is out of bounds, infinite or NaN.
    """
    if value is None and is_optional:
        return
    is_number = isinstance(value, numbers.Real) and not is_whole
    is_number |= is_whole and hasattr(value, "__index__")
    if value is None or isinstance(value, bool) or not is_number:
        kind = "an integer" if is_whole else "a number"
        raise TypeError(
            f"{name} must be {kind}. Received: {shown(value)} of type "
            f"{type(value).__name__}. {cure}"
        )
    number: Any = value
    for is_met, rule in (
        (is_whole or math.isfinite(number), "finite"),
        (least is None or number >= least, f">= {least}"),
        (above is None or number > above, f"> {above}"),
        (most is None or number <= most, f"<= {most}"),
    ):
        if not is_met:
            raise ValueError(
                f"{name} must be {rule}. Received: {shown(value)}. {cure}"
            )


def check_type(
    name: str, value: object, kind: Kind, what: str, cure: str
) -> None:
    """Raises TypeError unless a value is of a type.

    Args:
      name: What it is, for the error, which begins with it.
      value: What was given.
      kind: The type, or several, as of `isinstance`.
      what: The type in words: "a str".
      cure: The last sentence of the error.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be {what}. Received: {shown(value)} of type "
            f"{type(value).__name__}. {cure}"
        )


def check_port(port: int, name: str) -> int:
    """Returns a port from 1 to 65535; raises as `check_number`."""
    cure = "Give a port that is free on the hosts, as 8888."
    check_number(name, port, cure, least=1, most=MAX_PORT, is_optional=False)
    return port
