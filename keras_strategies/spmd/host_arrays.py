"""NumPy arrays that JAX can use on CPU without copying them.

JAX copies an array unless its address is a multiple of 64 bytes, and JAX's copy
takes about twice as long as NumPy's (jax 0.10.2). So this module allocates
arrays at aligned addresses.
"""

import math
import sys
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Array, Leaf

_ALIGNMENT = 64
# For smaller arrays, aligning the address takes longer than JAX's copy.
_MIN_BYTES = 2**16


def check_numbers(leaf: object, name: str = "an array") -> None:
    """Raises TypeError unless a leaf contains numbers or booleans."""
    if not holds_numbers(leaf):
        raise TypeError(
            "The arrays of a batch must contain numbers or booleans. "
            f"Received: {name} of dtype {getattr(leaf, 'dtype', None)} "
            f"({type(leaf).__name__}). Encode its values as numbers before "
            "training."
        )


def holds_numbers(leaf: object) -> bool:
    """Returns whether a leaf is an array of numbers or booleans."""
    return getattr(leaf, "dtype", np.dtype("O")).kind not in "OSUmM"


def copy_on_host(array: np.ndarray) -> np.ndarray:
    """Returns a copy of an array; a large copy gets an aligned address."""
    copy = _make_aligned(array.shape, array)
    if copy is None:
        return np.array(array)
    np.copyto(copy, array)
    return copy


def copy_if_mutable(leaf: Array) -> Array:
    """Copies an array unless it is a JAX array, which is immutable.

    Returns:
      An array with the same shape and dtype as the leaf.
    """
    return (
        leaf if isinstance(leaf, jax.Array) else copy_on_host(np.asarray(leaf))
    )


def from_tensor(leaf: Leaf) -> Leaf:
    """Converts a TensorFlow tensor to NumPy; returns other leaves unchanged.

    Returns:
      A NumPy array with the tensor's shape and dtype, or the leaf itself if it
      is not a tensor of numbers.
    """
    tensorflow = sys.modules.get("tensorflow")
    tensor: Any = getattr(tensorflow, "Tensor", None)
    if tensor is None or not isinstance(leaf, tensor):
        return leaf
    array = np.asarray(leaf)
    return leaf if array.dtype.hasobject else array


def align(array: Array) -> Array:
    """Returns the array, or an aligned copy that JAX will not copy again.

    Returns:
      An array of the same shape and dtype.
    """
    if (
        not isinstance(array, np.ndarray)
        or array.nbytes < _MIN_BYTES
        or (array.ctypes.data % _ALIGNMENT == 0 and array.flags.c_contiguous)
    ):
        return array
    return copy_on_host(array)


def take_rows(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns the rows at the given indices; copies each row only once.

    Args:
      array: The array.
      indices: Indices of the rows, all of them in range and nonnegative.
    """
    rows = _make_aligned((len(indices), *array.shape[1:]), array)
    if rows is None:
        return array[indices]
    # With other modes than "clip", NumPy fills a temporary array first.
    return np.take(array, indices, axis=0, out=rows, mode="clip")


def stack_arrays(arrays: list[np.ndarray]) -> np.ndarray:
    """Stacks arrays of one shape and dtype along a new first dimension."""
    shape = (len(arrays), *arrays[0].shape)
    return np.stack(arrays, out=_make_aligned(shape, arrays[0]))


def _make_aligned(
    shape: tuple[int, ...], like: np.ndarray
) -> np.ndarray | None:
    """Returns an uninitialized array that JAX can use without a copy.

    Args:
      shape: The shape of the array.
      like: An array of the same dtype.

    Returns:
      The array; None if it would be small, or `like` is not a plain array.
    """
    num_bytes = math.prod(shape) * like.dtype.itemsize
    is_plain = type(like) is np.ndarray and not like.dtype.hasobject
    if num_bytes < _MIN_BYTES or not is_plain:
        return None
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(like.dtype).reshape(shape)
