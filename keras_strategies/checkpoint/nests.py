"""Nests of a checkpoint's state: as JSON with arrays beside it, and as text."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.cluster.array_kinds import is_shape, parse_dtype
from keras_strategies.cluster.exchange.message_forms import (
    MAX_MESSAGE,
    fault_of,
)
from keras_strategies.cluster.untrusted import load_json

_ARRAY = "__array__"
_EMPTY = "__empty_array__"
_TUPLE = "__tuple__"
_SCALAR = "__scalar__"
_DICT = "__dict__"
# What is beside each mark.
_FORMS = {
    _ARRAY: str,
    _EMPTY: (is_shape, parse_dtype),
    _TUPLE: list,
    _SCALAR: (bool | int | float, parse_dtype),
    _DICT: dict,
}
_MARKS = tuple({mark} for mark in _FORMS)
# An array between processes: its dtype, shape, and bytes.
_ARRAY_FORM = (parse_dtype, is_shape, str)


def split(state: Tree) -> tuple[Tree, dict[str, np.ndarray]]:
    """A nest as JSON, and the arrays that it held.

    Args:
      state: Dicts with strings as keys, lists, tuples, arrays, numbers,
        strings, booleans, None.

    Raises:
      TypeError: something else is in it.
    """
    arrays: dict[str, np.ndarray] = {}

    def encode(value: Tree, path: str) -> Tree:
        if value is None or isinstance(value, bool | int | float | str):
            return _plain(value)
        if isinstance(value, np.generic) and _is_real(value.dtype):
            # What is computed with it has its dtype.
            return {_SCALAR: [value.item(), str(value.dtype)]}
        if isinstance(value, np.ndarray | jax.Array) and (
            _is_real(value.dtype) or value.dtype.kind == "c"
        ):
            if not value.size:
                return {_EMPTY: [list(value.shape), str(value.dtype)]}
            name = f"{len(arrays):05d}"
            arrays[name] = np.asarray(value)
            return {_ARRAY: name}
        if isinstance(value, tuple):
            return {_TUPLE: [encode(v, f"{path}[]") for v in value]}
        if isinstance(value, list):
            return [encode(v, f"{path}[]") for v in value]
        if isinstance(value, Mapping) and all(
            isinstance(key, str) for key in value
        ):
            entries = {
                str(k): encode(v, f"{path}[{k!r}]") for k, v in value.items()
            }
            return {_DICT: entries} if set(entries) in _MARKS else entries
        kind = type(value).__name__
        dtype = getattr(value, "dtype", None)
        if dtype is not None:
            kind += f" with dtype {dtype}"
        raise TypeError(
            "A checkpoint's state is made of dicts with strings as "
            "keys, lists, tuples, arrays of numbers, numbers, strings, "
            f"booleans and None. Received: an object of type {kind} at "
            f"{path or 'the top'}. Change what `get_state` returns."
        )

    return encode(state, ""), arrays


def joined(state: Tree, arrays: Mapping[str, Any]) -> Tree:
    """The nest that `split` has split.

    Args:
      state: JSON that `load_json` gave; a file may say anything.
      arrays: Those that it names.

    Returns:
      Dicts, lists, tuples, arrays of numpy and numbers, as `split` was given.

    Raises:
      ValueError: it is no such nest.
    """
    if isinstance(state, list):
        return [joined(v, arrays) for v in state]
    if not isinstance(state, dict):
        return state
    mark = next(iter(state), None) if len(state) == 1 else None
    if mark not in _FORMS:
        return {key: joined(v, arrays) for key, v in state.items()}
    held = state[mark]
    if fault_of(held, _FORMS[mark]) is not None:
        raise _no_nest(f"what {mark!r} marks is something else")
    if mark == _ARRAY:
        if held not in arrays:
            raise _no_nest("an array is missing")
        return np.asarray(arrays[held])
    if mark == _TUPLE:
        return tuple(joined(v, arrays) for v in held)
    if mark == _DICT:
        return {key: joined(v, arrays) for key, v in held.items()}
    if mark == _SCALAR:
        return _scalar(*held)
    shape, dtype = held
    if 0 not in shape:
        raise _no_nest("an array without entries has some")
    return np.empty(shape, parse_dtype(dtype))


def packed(state: Tree) -> str:
    """A nest, its arrays too, as text that other processes read."""
    plain, arrays = split(state)
    arrays_sent = {
        name: [
            str(array.dtype),
            list(array.shape),
            base64.b64encode(array.tobytes()).decode("ascii"),
        ]
        for name, array in arrays.items()
    }
    return json.dumps([plain, arrays_sent])


def unpacked(text: str) -> Tree:
    """The nest that `packed` has packed.

    Returns:
      See `joined`.

    Raises:
      ValueError: another process has said something else.
    """
    try:
        message = load_json(text, max_characters=MAX_MESSAGE, has_nan=True)
    except ValueError as error:
        raise _no_nest(str(error)) from None
    fault = fault_of(message, (object, dict)) or fault_of(
        list(message[1].values()), [_ARRAY_FORM]
    )
    if fault is not None:
        raise _no_nest(fault)
    plain, arrays_sent = message
    arrays = {name: _array(*array) for name, array in arrays_sent.items()}
    return joined(plain, arrays)


def _array(dtype: str, shape: list[int], raw: str) -> np.ndarray:
    try:
        data = base64.b64decode(raw, validate=True)
        return np.frombuffer(data, parse_dtype(dtype)).reshape(shape)
    except ValueError:
        raise _no_nest("an array has another size") from None


def _scalar(value: float, dtype: str) -> np.generic:
    kind = parse_dtype(dtype)
    try:
        if kind is None or not _is_real(kind):
            raise ValueError
        return kind.type(value)
    except (ValueError, OverflowError):
        raise _no_nest("a number is not of its dtype") from None


def _no_nest(fault: str) -> ValueError:
    return ValueError(
        "A checkpoint holds a nest as `get_state` returned it. "
        f"Received: one of which {fault}. Use an earlier checkpoint, and "
        "start all processes with one version of keras_strategies."
    )


def _is_real(dtype: np.dtype) -> bool:
    """Whether it is of booleans, integers or floats, bfloat16 too."""
    return dtype.kind in "biuf" or (
        dtype.kind == "V" and jnp.issubdtype(dtype, np.number)
    )


def _plain(value: object) -> bool | float | str | None:
    """Without subclasses (of numpy's float64, for one)."""
    if isinstance(value, bool) or value is None:
        return value
    kinds = (int, float, str)
    return next(kind(value) for kind in kinds if isinstance(value, kind))
