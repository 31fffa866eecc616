"""Type aliases that document what Python's types cannot express.

Type checkers see most of them as `Any`: trees have any depth, and arrays may be
those of JAX, NumPy, TensorFlow or torch, including abstract ones.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array, or an object with the `shape` and `dtype` of one."""

Tree: TypeAlias = Any
"""Leaves in nested dicts, lists and tuples, or one leaf."""

Leaf: TypeAlias = Any
"""One value of a tree: an array, a number, or any other object."""

Batch: TypeAlias = Any
"""A tree of arrays with rows as their first dimension: (rows, ...).

The batches of Keras's loops are x, (x, y) or (x, y, sample_weight), as in
`keras.utils.unpack_x_y_sample_weight`.
"""

Groups: TypeAlias = tuple[list[Any], ...]
"""A step's state: the arrays of each group of variables, in order."""

Shape: TypeAlias = tuple[int, ...]
"""The sizes of an array's dimensions."""

Logs: TypeAlias = Mapping[str, Any]
"""Values by name, as Keras's loops pass them to callbacks."""

Dataset: TypeAlias = Any
"""The data of `fit` and `experimental_distribute_dataset`."""

Callbacks: TypeAlias = Any
"""The `callbacks` of a loop: one, a list, a `CallbackList`, or None."""

Equation: TypeAlias = Any
"""A `JaxprEqn`; `Any`, as JAX declares no `shape` and `dtype` of operands."""
