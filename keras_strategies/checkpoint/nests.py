"""Encoding a checkpoint's state as JSON and arrays, or as text.

The states of objects are gathered from all processes of a job.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.cluster.array_kinds import is_shape, parse_dtype
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.message_forms import (
    MAX_MESSAGE,
    Either,
    has_form,
    load_form,
)

_STATES = Either(({"all": dict}, {"each": [dict]}))


def gather_states(
    states: Mapping[str, Any], processes: tuple[int, ...]
) -> Mapping[str, Any]:
    """Gathers the states of a checkpoint's objects. Collective.

    Args:
      states: The states of the objects in this process, by object name.
      processes: JAX's ids of all processes.

    Returns:
      {"all": states} if the states are equal in all processes, else
      {"each": [states, ...]} with the states of each process, in the order of
      `processes`.
    """
    text = pack(states)
    if len(processes) == 1:
        return {"all": states}
    agreement = Agreement(processes, "gathering the states of objects to save")
    # States may be long. So hashes are exchanged first, and the states only if
    # the hashes differ.
    hashes = agreement.exchange(hashlib.sha256(text.encode()).hexdigest())
    are_equal = len(set(hashes)) == 1
    received = [] if are_equal else agreement.exchange(text)
    agreement.end()
    if are_equal:
        return {"all": states}
    return {"each": [unpack(one) for one in received]}


def select_local_states(
    state: Tree, processes: tuple[int, ...], where: str
) -> Mapping[str, Any]:
    """Selects this process's states of objects from a checkpoint.

    Args:
      state: The result of `gather_states`, as read from a checkpoint. It is not
        trusted.
      processes: JAX's ids of all processes of this job.
      where: The path of the checkpoint, for messages.

    Raises:
      ValueError: if `state` is not a result of `gather_states`, or contains the
        states of a different number of processes.
    """
    if not has_form(state, _STATES):
        raise ValueError(
            "Objects must be restored from a checkpoint that contains their "
            f"states. Received: {where}, whose state is malformed. Pass a "
            "checkpoint of a `CheckpointManager` or of `Checkpoint.save`."
        )
    if "all" in state:
        return state["all"]
    if len(state["each"]) != len(processes):
        raise ValueError(
            "A run whose processes saved different states must resume with the "
            "same number of processes. Received: the states of "
            f"{len(state['each'])} processes in a job with {len(processes)}. "
            "Start the same number of processes. A run can resume with any "
            "number if the states of all its processes are equal, for example "
            "because all of them read the same data."
        )
    return state["each"][processes.index(jax.process_index())]


_ARRAY = "__array__"
_EMPTY = "__empty_array__"
_TUPLE = "__tuple__"
_SCALAR = "__scalar__"
_DICT = "__dict__"
# A value that JSON cannot represent is encoded as a dict with a single key, a
# mark. This table has the valid types of the encoded value for each mark.
_FORMS = {
    _ARRAY: str,
    _EMPTY: (is_shape, parse_dtype),
    _TUPLE: list,
    _SCALAR: (bool | int | float, parse_dtype),
    _DICT: dict,
}
_MARKS = tuple({mark} for mark in _FORMS)
# The encoding of an array that is sent to other processes: dtype, shape, bytes.
_ARRAY_FORM = (parse_dtype, is_shape, str)


def split(state: Tree) -> tuple[Tree, dict[str, np.ndarray]]:
    """Splits a nest into JSON and a dict of the arrays in it.

    Args:
      state: A nest of dicts with strings as keys, lists, tuples, arrays,
        numbers, strings, booleans and None.

    Returns:
      The nest as JSON, in which placeholders with the arrays' names replace the
      arrays; and the arrays by name.

    Raises:
      TypeError: if `state` contains a value of another type.
    """
    arrays: dict[str, np.ndarray] = {}

    def encode(value: Tree, path: str) -> Tree:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic) and _is_real(value.dtype):
            # The dtype is stored, too, since the results of computations with
            # this number depend on it.
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
        items = value.items() if isinstance(value, Mapping) else [(0, None)]
        if all(isinstance(key, str) for key, _ in items):
            entries = {str(k): encode(v, f"{path}[{k!r}]") for k, v in items}
            return {_DICT: entries} if set(entries) in _MARKS else entries
        kind = type(value).__name__
        dtype = getattr(value, "dtype", None)
        kind += f" with dtype {dtype}" * (dtype is not None)
        raise TypeError(
            "A checkpoint's state must consist of dicts with strings as "
            "keys, lists, tuples, arrays of numbers, numbers, strings, "
            f"booleans and None. Received: an object of type {kind} at "
            f"{path or 'the top level'}. Change what `get_state` returns."
        )

    return encode(state, ""), arrays


def join(state: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Rebuilds a nest from the two results of `split`.

    Args:
      state: The first result, read by `load_form`. It is not trusted.
      arrays: The arrays, by the names in `state`.

    Returns:
      Dicts, lists, tuples, numpy arrays and numbers, as passed to `split`.

    Raises:
      ValueError: if `state` is not a result of `split`.
    """
    if isinstance(state, list):
        return [join(v, arrays) for v in state]
    if not isinstance(state, dict):
        return state
    mark = next(iter(state), None) if len(state) == 1 else None
    if mark not in _FORMS:
        return {key: join(v, arrays) for key, v in state.items()}
    content = state[mark]
    if not has_form(content, _FORMS[mark]):
        raise _make_error(f"the value of {mark!r} is malformed")
    if mark == _ARRAY:
        if content not in arrays:
            raise _make_error("an array is missing")
        return np.asarray(arrays[content])
    if mark == _TUPLE:
        return tuple(join(v, arrays) for v in content)
    if mark == _DICT:
        return {key: join(v, arrays) for key, v in content.items()}
    if mark == _SCALAR:
        return _decode_scalar(*content)
    shape, dtype = content
    if 0 not in shape:
        raise _make_error("an array that should be empty is not empty")
    return np.empty(shape, parse_dtype(dtype))


def pack(state: Tree) -> str:
    """Encodes a nest, including its arrays, as text for other processes."""
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


def unpack(text: str) -> Tree:
    """Decodes a nest that another process encoded with `pack`.

    Returns:
      The nest; see `join`.

    Raises:
      ValueError: if `text` is not a result of `pack`.
    """
    try:
        plain, sent = load_form(
            text, (object, dict), max_characters=MAX_MESSAGE, has_nan=True
        )
        if not has_form([*sent.values()], [_ARRAY_FORM]):
            raise ValueError("an array has a wrong structure")
        arrays = {name: _decode_array(*array) for name, array in sent.items()}
    except ValueError as error:
        raise _make_error(str(error)) from None
    return join(plain, arrays)


def _decode_array(dtype: str, shape: list[int], raw: str) -> np.ndarray:
    data = base64.b64decode(raw, validate=True)
    return np.frombuffer(data, parse_dtype(dtype)).reshape(shape)


def _decode_scalar(value: float, dtype: str) -> np.generic:
    kind = parse_dtype(dtype)
    try:
        if kind is None or not _is_real(kind):
            raise ValueError
        return kind.type(value)
    except (ValueError, OverflowError):
        raise _make_error("a number does not fit its dtype") from None


def _make_error(problem: str) -> ValueError:
    return ValueError(
        "A checkpoint's state must be as it was saved. The state is malformed: "
        f"{problem}. Use an earlier checkpoint, and make sure that all "
        "processes use the same version of keras_strategies."
    )


def _is_real(dtype: np.dtype) -> bool:
    """Returns whether a dtype is boolean, integer or float (also bfloat16)."""
    return dtype.kind in "biuf" or (
        dtype.kind == "V" and jnp.issubdtype(dtype, np.number)
    )
