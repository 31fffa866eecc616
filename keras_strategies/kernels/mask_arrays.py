"""Recognizes what an array means that a step computes as attention's mask.

Layers compute masks as arrays: causal masks, windows, padding and the segments
of packed rows, combined by "and". The kernel needs their parts, not the array,
which has an entry for each pair of a query and a key. So the array's equations
are followed back to positions (`iota`) and to flags, which have no such pairs.
The array is then computed for each distance of a key from a query, and for each
combination of flags: if it is true for a range of distances, and if all flags
have certain values, these are its parts. What is not understood stays an array:
nothing is guessed.
"""

import functools
import itertools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Array
from keras_strategies.kernels.attention_mask import AttentionMask, Limits
from keras_strategies.kernels.mask_values import (
    BY_ENTRY,
    HEADS,
    KEYS,
    QUERIES,
    ROWS,
    NotRecognized,
    Value,
    compute_entries,
)

_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
_MAX_FLAGS = 8
Known = tuple[AttentionMask, Array | None]
"""A mask, and for which rows it is wrong, or None."""
_Flag = tuple[Value, Value | None]
"""A flag, or two values that are compared: one of the queries, one of the keys.
"""


def recognize_mask(array: Array, query: Array, key: Array) -> Known | None:
    """Returns the mask that an array is, if that is recognized.

    Args:
      array: The mask, of shape (batch or 1, heads or 1, T, S).
      query: An array of shape (batch, T, heads, depth).
      key: An array of shape (batch, S, heads or a divisor of it, depth).

    Returns:
      The mask, and for which rows it is wrong, of shape (batch,); None if it is
      right for all. It is wrong if a padding mask of numbers has negative ones.
      The result is None if the array is not recognized.
    """
    shape = np.shape(array)
    if not len(shape) == query.ndim == key.ndim == 4:
        return None
    sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    pairs = zip(shape, sizes, strict=True)
    if not all(n in (1, size) for n, size in pairs) or 0 in sizes:
        return None
    try:
        table = _Table(sizes)
        dims, budget = tuple(range(4)), itertools.count()
        entries = table.compute(Value.of(array, None, dims, sizes, budget))
        return table.make_mask(entries != 0)
    except NotRecognized:
        return None


class _Table:
    """Computes a mask for each distance, and for each combination of flags.

    The last dimension of its arrays is that of the distances, and each one
    before is that of a flag, from the last flag to the first. Arrays broadcast:
    they may lack the first dimensions.

    Args:
      sizes: The shape of the mask.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._distances = np.arange(1 - sizes[QUERIES], sizes[KEYS])
        self._flags: list[_Flag] = []
        self._assumed: list[Value] = []

    def compute(self, value: Value) -> np.ndarray:
        """Computes a value.

        Raises:
          NotRecognized: if it is not computed from distances and flags.
        """
        value = value.skip_moves()
        if not {QUERIES, KEYS} <= value.find_dims():
            number = value.sample({})
            if number is not None:
                return number
            if not _is_binary(value):
                raise NotRecognized
            return self._add_flag(value)
        if value.equation is None:
            return self._read_array(value)
        if value.name not in BY_ENTRY:
            raise NotRecognized
        operands = value.operands
        entries = self._compare(value, operands)
        if entries is None and value.name == "min":
            entries = self._compute_minimum(value, operands)
        if entries is None:
            entries = compute_entries(value, map(self.compute, operands))
        return entries

    def _add_flag(
        self, value: Value, other: Value | None = None, dtype: Any = None
    ) -> np.ndarray:
        self._flags.append((value, other))
        if len(self._flags) > _MAX_FLAGS:
            raise NotRecognized
        flag = np.array([0, 1], dtype or value.dtype)
        return flag.reshape(2, *[1] * len(self._flags))

    def _read_array(self, value: Value) -> np.ndarray:
        """Reads an array that is known when the step is traced."""
        if value.constant is None or {ROWS, HEADS} & {*value.dims}:
            raise NotRecognized
        array = np.asarray(value.constant)
        array = value.with_dims(array, (QUERIES, KEYS))
        if (array[1:, 1:] != array[:-1, :-1]).any():
            raise NotRecognized
        return np.concatenate([array[:0:-1, 0], array[0]])

    def _compare(
        self, value: Value, operands: list[Value]
    ) -> np.ndarray | None:
        """Compares values of queries with those of keys, or subtracts them."""
        if value.name not in (*_COMPARISONS, "sub", "add"):
            return None
        dims = [v.find_dims() for v in operands]
        if any({QUERIES, KEYS} <= each for each in dims):
            return None
        axes = {dim: np.arange(self._sizes[dim]) for dim in (QUERIES, KEYS)}
        found = [v.sample(axes) for v in operands]
        known = [array for array in found if array is not None]
        if len(known) < len(found):
            if value.name != "eq" or not all(map(_is_integer, operands)):
                return None
            queries, keys = operands if QUERIES in dims[0] else operands[::-1]
            return self._add_flag(queries, keys, dtype=bool)
        # Positions along a dimension of size 1 are one number for all.
        steps = [{*np.diff(np.float64(a))} if a.ndim else {0} for a in known]
        if value.name == "add":
            steps[0] = {-step for step in steps[0]}
        if len(steps[0] | steps[1]) > 1:
            raise NotRecognized
        # With equal steps, the result only depends on the distance.
        places = {
            QUERIES: np.clip(-self._distances, 0, None),
            KEYS: np.clip(self._distances, 0, None),
        }
        return compute_entries(value, [v.sample(places) for v in operands])

    def _compute_minimum(
        self, value: Value, operands: list[Value]
    ) -> np.ndarray | None:
        """Computes a minimum of 0 or 1 and numbers of tokens.

        These are assumed not to be negative, so that the minimum is 0 or 1.
        """
        others = [v for v in operands if not {QUERIES, KEYS} <= v.find_dims()]
        numbers = [v for v in others if not _is_binary(v)]
        if len(numbers) != 1 or not _is_integer(numbers[0]):
            return None
        (other,) = (v for v in operands if v is not numbers[0])
        entries = self.compute(other)
        if not np.isin(entries, (0, 1)).all():
            raise NotRecognized
        self._assumed += numbers
        return compute_entries(value, (entries, self._add_flag(numbers[0])))

    def make_mask(self, is_used: np.ndarray) -> Known:
        """Returns the mask, and for which rows it is wrong.

        Args:
          is_used: Whether the keys at a distance are attended to.
        """
        used = dict[int, Array]()
        segments: tuple[Array | None, ...] = (None, None)
        shape = *[2] * len(self._flags), len(self._distances)
        is_used = np.broadcast_to(is_used, shape)
        for value, other in reversed(self._flags):
            no, yes = is_used
            is_used = no if not yes.any() else yes
            if (no == yes).all():
                continue
            if no.any() and yes.any():
                raise NotRecognized
            if other is None:
                dim = _find_dim(value)
                flag = (value.compute_rows(dim) != 0) == yes.any()
                used[dim] = flag & used[dim] if dim in used else flag
            elif yes.any() and segments[0] is None:
                one, two = value.compute_rows(QUERIES), other.compute_rows(KEYS)
                segments = one.astype("int32"), two.astype("int32")
            else:
                raise NotRecognized
        left, right = self._find_limits(is_used)
        arrays = used.get(QUERIES), used.get(KEYS), *segments, None
        mask = AttentionMask(left=left, right=right).with_arrays(arrays)
        wrong = [
            (v.compute_rows(_find_dim(v)) < 0).any(1) for v in self._assumed
        ]
        return mask, functools.reduce(operator.or_, wrong) if wrong else None

    def _find_limits(self, is_used: np.ndarray) -> Limits:
        """Returns the largest distances to earlier and to later keys."""
        used = self._distances[is_used]
        if 0 not in used or len(used) <= used[-1] - used[0]:
            raise NotRecognized
        return (
            None if is_used[0] else -int(used[0]),
            None if is_used[-1] else int(used[-1]),
        )


def _is_integer(value: Value) -> bool:
    return value.dtype.kind in "biu" and value.dtype.itemsize <= 4


def _find_dim(value: Value) -> int:
    return QUERIES if QUERIES in value.find_dims() else KEYS


def _is_binary(value: Value) -> bool:
    """Returns whether each number of a value is surely 0 or 1."""
    value = value.skip_moves()
    if value.dtype == jnp.bool_ or value.sample({}) in (0, 1):
        return True
    if value.name in ("min", "max", "mul", "and", "convert_element_type"):
        return all(map(_is_binary, value.operands))
    return value.name == "select_n" and all(map(_is_binary, value.operands[1:]))
