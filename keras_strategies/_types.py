"""Names for what annotations mean where Python's types say nothing.

Each is `Any` to a type checker: trees have any depth, and arrays may be those
of JAX, NumPy, TensorFlow or torch, abstract ones among them.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array, or what answers like one: `shape` and `dtype`."""

Tree: TypeAlias = Any
"""Leaves in nested dicts, lists and tuples, or one leaf."""

Batch: TypeAlias = Any
"""A tree of arrays with rows as their first dimension: (rows, ...)."""

Groups: TypeAlias = tuple[list[Any], ...]
"""A step's state: the arrays of each group of variables, in their order."""

Shape: TypeAlias = tuple[int, ...]
"""The sizes of an array's dimensions."""

Logs: TypeAlias = Mapping[str, Any]
"""Values by name, as Keras's loops hand them to callbacks."""

Dataset: TypeAlias = Any
"""What `fit` and `experimental_distribute_dataset` take as data."""
