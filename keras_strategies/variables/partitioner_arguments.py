"""Checks of the arguments of partitioners."""

import inspect
from collections.abc import Callable
from typing import Any


def check_offload(offload: object) -> None:
    """Raises ValueError unless `offload` is "optimizer" or None."""
    if offload not in (None, "optimizer"):
        raise ValueError(
            "`offload` must be 'optimizer' or None. Received: "
            f"{offload!r} of type {type(offload).__name__}. Pass 'optimizer' "
            "to store optimizer slots in the memory of the host."
        )


def check_partitioner(partitioner: object, is_known: bool) -> None:
    """Raises TypeError unless an object can be a strategy's partitioner.

    Args:
      partitioner: The object.
      is_known: Whether its class is one of this package's.
    """
    if not callable(partitioner) and not is_known:
        raise TypeError(
            "`variable_partitioner` must be a partitioner or a function. "
            f"Received: {partitioner!r} of type {type(partitioner).__name__}. "
            "Pass `ks.experimental.FullySharded()`, `SlotsOnly()`, "
            "`Replicated('bfloat16')`, or a function of a variable's path, "
            "shape and dtype that returns a dimension or None."
        )
    cls = partitioner if isinstance(partitioner, type) else type(partitioner)
    if cls.__module__.startswith("tensorflow"):
        raise TypeError(
            "`variable_partitioner` must be a `ks.experimental` partitioner. "
            f"Received: TensorFlow's {cls.__name__}, which chooses a number of "
            "shards for parameter servers. Pass "
            "`ks.experimental.FullySharded()`. Its `min_size` is a number of "
            "entries, not of bytes."
        )
    if cls is partitioner:
        raise TypeError(
            "`variable_partitioner` must be an object or a function. "
            f"Received: the class {cls.__name__}. Add parentheses to create an "
            f"object: `{cls.__name__}()`."
        )


def has_tf_signature(partitioner: Callable[..., Any]) -> bool:
    """Returns whether a function takes only `shape` and `dtype`, as in tf.

    Raises:
      TypeError: if the function accepts neither (shape, dtype) nor (path,
        shape, dtype).
    """
    try:
        signature = inspect.signature(partitioner)
    except ValueError:
        return False
    try:
        signature.bind("path", (1,), "float32")
        return False
    except TypeError:
        pass
    try:
        signature.bind(shape=(1,), dtype="float32")
    except TypeError as error:
        raise TypeError(
            "`variable_partitioner` must accept a variable's path, shape and "
            f"dtype. Received: {partitioner!r} with the arguments {signature}. "
            "Define the function as `def partitioner(path, shape, dtype)`."
        ) from error
    return True
