"""Type aliases that document what Python's types cannot express.

Type checkers see most of the aliases as `Any`, because trees may have any depth
and arrays may come from JAX, NumPy, TensorFlow or torch, or be abstract.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array, or an object that has `shape` and `dtype` as an array does."""

Tree: TypeAlias = Any
"""A nested structure of dicts, lists and tuples with leaves, or one leaf."""

Leaf: TypeAlias = Any
"""One value of a tree: an array, a number, or any other object."""

Batch: TypeAlias = Any
"""A tree of arrays of shape (rows, ...): their first dimension is the rows.

In Keras's loops, a batch is x, (x, y) or (x, y, sample_weight), as in
`keras.utils.unpack_x_y_sample_weight`.
"""

Groups: TypeAlias = tuple[list[Any], ...]
"""A step's state: a list of arrays for each group of variables."""

Shape: TypeAlias = tuple[int, ...]
"""The sizes of an array's dimensions."""

Logs: TypeAlias = Mapping[str, Any]
"""The `logs` that Keras's loops pass to callbacks: a value for each name."""

Dataset: TypeAlias = Any
"""Data that `fit` or `experimental_distribute_dataset` accepts."""

Callbacks: TypeAlias = Any
"""The argument `callbacks`: a callback, a list, a `CallbackList` or None."""

Equation: TypeAlias = Any
"""A `JaxprEqn`.

The alias is `Any`, because JAX's type annotations do not declare the `shape`
and `dtype` of an equation's operands.
"""
