"""What is known of a replica function's results when it is traced."""

import dataclasses
from typing import Any

import jax
import keras
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What is known of a call when it is traced.

    Attributes:
      structure: Of the results, and those of them that are no arrays.
      is_changed: Whether each variable was written.
      is_equal: Whether it was written the same on every replica.
      rules: How the variables of metrics are merged; None of others.
      is_unaggregated: Whether the replicas must have written the same value.
    """

    structure: Any
    is_changed: list[bool]
    is_equal: list[bool]
    rules: list[str | None]
    is_unaggregated: list[bool]


class Constant:
    """A result that is no array: the same for every replica and call."""

    def __init__(self, value: Any) -> None:
        self.value = value


def constant_of(leaf: Any) -> Constant | None:
    """The constant that a result is, or None for an array.

    Raises:
      TypeError: neither.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return None
    if leaf is None or isinstance(
        leaf, bool | int | float | complex | str | bytes | keras.Variable
    ):
        return Constant(leaf)
    raise TypeError(
        "A function given to `run` returns arrays, numbers, strings or None, "
        "in nests of tuples, lists and dicts. Received: a result of type "
        f"{type(leaf).__name__}. Return its arrays instead."
    )
