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

Leaf: TypeAlias = Any
"""One value of a tree: an array, a number, or what else users put there."""

Batch: TypeAlias = Any
"""A tree of arrays with rows as their first dimension: (rows, ...).

A loop's is x, (x, y) or (x, y, sample_weight), as
`keras.utils.unpack_x_y_sample_weight` takes it.
"""

Groups: TypeAlias = tuple[list[Any], ...]
"""A step's state: the arrays of each group of variables, in their order."""

Shape: TypeAlias = tuple[int, ...]
"""The sizes of an array's dimensions."""

Logs: TypeAlias = Mapping[str, Any]
"""Values by name, as Keras's loops hand them to callbacks."""

Dataset: TypeAlias = Any
"""What `fit` and `experimental_distribute_dataset` take as data."""

Callbacks: TypeAlias = Any
"""What loops take as `callbacks`: one, a list, a `CallbackList`, or None."""

Equation: TypeAlias = Any
"""A `JaxprEqn` of arrays: JAX declares no `shape` and `dtype` of operands."""
