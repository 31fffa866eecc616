"""What a checkpoint holds: arrays by group and name, and a document of JSON.

The arrays are what `weights`, `optimizer` and so on are made of, under the
paths of their variables, so that plain Orbax reads them. The document says
all else; arrays in it (a callback's best weights) are a group of their own.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import set_apart
from keras_strategies.checkpoint.documents import VERSION
from keras_strategies.keras_bridge.partitions import sharding_of

Groups = Mapping[str, Sequence[keras.Variable]]
Arrays = dict[str, dict[str, Any]]
Document = dict[str, Any]

STATE = "state_arrays"
"""The group of the arrays that the document's state holds."""

_WEIGHTS = "weights"
_ARRAY = "__array__"
_EMPTY = "__empty_array__"
_TUPLE = "__tuple__"
_SCALAR = "__scalar__"
_DICT = "__dict__"
_MARKS = ({_ARRAY}, {_EMPTY}, {_TUPLE}, {_SCALAR}, {_DICT})
_MAX_SHOWN = 8


def arrays_of(groups: Groups) -> Arrays:
    """The values of variables, by group and name, for `Storage.save`."""
    return {
        group: {
            name: set_apart(variable.value)
            for name, variable in named(variables).items()
        }
        for group, variables in groups.items()
        if variables
    }


def processes_of(
    groups: Groups,
) -> tuple[int, ...]:
    """JAX's ids of the processes that hold variables."""
    found = {
        device.process_index
        for variables in groups.values()
        for variable in variables
        for device in variable.value.sharding.device_set
    }
    return tuple(sorted(found)) or (jax.process_index(),)


def named(variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """Variables by their paths, with dots; numbered where paths are equal.

    Those without any value are left out: Orbax keeps none of size zero.
    """
    found: dict[str, keras.Variable] = {}
    for variable in variables:
        if not variable.value.size:
            continue
        path = name = variable.path.replace("/", ".")
        number = 1
        while name in found:
            name = f"{path}~{number}"
            number += 1
        found[name] = variable
    return found


def document_of(arrays: Arrays, state: Any) -> Document:
    """The document of a checkpoint.

    Args:
      arrays: All of its arrays, by group and name.
      state: All else, as JSON.
    """
    return {
        "version": VERSION,
        "variables": described(arrays),
        "state": state,
    }


def check_version(document: Document, where: str) -> None:
    """Raises ValueError if another version has written the document."""
    version = document.get("version")
    if version != VERSION:
        raise ValueError(
            "A checkpoint is read by the version of keras_strategies that "
            f"knows its format. Received: {where} of format "
            f"{ascii(version)[:80]}, known is {VERSION}. Install the version "
            "that wrote it."
        )


def described(arrays: Arrays) -> dict[str, dict[str, list[Any]]]:
    """The shape and dtype of each array, for the document."""
    return {
        group: {
            name: [list(np.shape(array)), str(array.dtype)]
            for name, array in entries.items()
        }
        for group, entries in arrays.items()
    }


def matched(
    groups: Groups, document: Document, where: str
) -> dict[str, dict[str, keras.Variable]]:
    """The variable for each array of a checkpoint, by group and saved name.

    Keras numbers the layers of a process: names that differ by numbers alone
    are the same, in their order.

    Args:
      groups: Those of the model that is to have the values.
      document: The checkpoint's.
      where: The checkpoint, for messages.

    Raises:
      ValueError: names, shapes or dtypes differ; they are listed.
    """
    kept = document["variables"]
    faults: list[str] = []
    found: dict[str, dict[str, keras.Variable]] = {}
    names = {group for group, variables in groups.items() if variables}
    # Weights first: what differs there explains what the others lack.
    for group in sorted(
        names | set(kept) - {STATE}, key=lambda name: (name != _WEIGHTS, name)
    ):
        saved = kept.get(group, {})
        present = named(groups.get(group, ()))
        pairs = _pairs(saved, present)
        if pairs is None:
            faults += _differences(group, saved, present)
            continue
        for name, variable in pairs.items():
            shape, dtype = saved[name]
            here = [list(variable.shape), str(variable.value.dtype)]
            if here != [shape, dtype]:
                faults.append(
                    f"{group} {name}: {dtype}{shape} in the checkpoint, "
                    f"{here[1]}{here[0]} here"
                )
        found[group] = pairs
    if faults:
        what = (
            "model"
            if any(fault.startswith(f"{_WEIGHTS} ") for fault in faults)
            else " or ".join(sorted({f.partition(" ")[0] for f in faults}))
        )
        shown = "; ".join(faults[:_MAX_SHOWN])
        more = len(faults) - _MAX_SHOWN
        raise ValueError(
            "A checkpoint is restored into a model with the same variables. "
            f"Received: {where}, which is of another {what}: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. Make the model as "
            "it was, or give another directory to this one."
        )
    return found


def subset(
    saved: Mapping[str, Any], variables: Sequence[keras.Variable]
) -> dict[str, Any] | None:
    """The saved arrays of some variables, which come in the same order.

    Args:
      saved: The shape and dtype of arrays by name; of others, too.
      variables: The variables.

    Returns:
      Their entries of `saved`; None if one is not there.
    """
    found: dict[str, Any] = {}
    entries = iter(saved.items())
    for name, variable in named(variables).items():
        wanted = without_numbers(name)
        kind = [list(variable.shape), str(variable.value.dtype)]
        for other, entry in entries:
            if without_numbers(other) == wanted and entry == kind:
                found[other] = entry
                break
        else:
            return None
    return found or None


def without_numbers(name: str) -> str:
    """A name without those that Keras gives the layers of a process."""
    return re.sub(r"_\d+", "", name)


def targets(
    found: Mapping[str, Mapping[str, keras.Variable]],
    document: Document,
    mesh: ReplicaMesh | None,
) -> Arrays:
    """What Orbax restores: shapes, dtypes and where each array is to lie."""
    wanted: Arrays = {}
    for group, entries in found.items():
        if entries:
            wanted[group] = {
                name: _target(variable, mesh)
                for name, variable in entries.items()
            }
    for name, (shape, dtype) in document["variables"].get(STATE, {}).items():
        wanted.setdefault(STATE, {})[name] = np.empty(shape, dtype)
    return wanted


def assign(
    found: Mapping[str, Mapping[str, keras.Variable]], arrays: Arrays
) -> None:
    """Gives variables the values that were restored for them."""
    for group, entries in found.items():
        for name, variable in entries.items():
            variable.assign(arrays[group][name])


def split(state: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A nest as JSON, and the arrays that it held.

    Args:
      state: Dicts with strings as keys, lists, tuples, arrays, numbers,
        strings, booleans, None.

    Raises:
      TypeError: something else is in it.
    """
    arrays: dict[str, np.ndarray] = {}

    def encode(value: Any, path: str) -> Any:
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
            "What is kept in a checkpoint is made of dicts with strings as "
            "keys, lists, tuples, arrays of numbers, numbers, strings, "
            f"booleans and None. Received: an object of type {kind} at "
            f"{path or 'the top'}. Change what `get_state` returns."
        )

    return encode(state, ""), arrays


def joined(state: Any, arrays: Mapping[str, Any]) -> Any:
    """The nest that `split` has split."""
    if isinstance(state, list):
        return [joined(v, arrays) for v in state]
    if not isinstance(state, dict):
        return state
    if set(state) == {_ARRAY}:
        return np.asarray(arrays[state[_ARRAY]])
    if set(state) == {_EMPTY}:
        shape, dtype = state[_EMPTY]
        return np.empty(shape, dtype)
    if set(state) == {_SCALAR}:
        value, dtype = state[_SCALAR]
        return np.dtype(dtype).type(value)
    if set(state) == {_TUPLE}:
        return tuple(joined(v, arrays) for v in state[_TUPLE])
    if set(state) == {_DICT}:
        state = state[_DICT]
    return {key: joined(v, arrays) for key, v in state.items()}


def packed(state: Any) -> str:
    """A nest, its arrays too, as text that other processes read."""
    plain, arrays = split(state)
    said = {
        name: [
            str(array.dtype),
            list(array.shape),
            base64.b64encode(array.tobytes()).decode("ascii"),
        ]
        for name, array in arrays.items()
    }
    return json.dumps([plain, said])


def unpacked(text: str) -> Any:
    """The nest that `packed` has packed."""
    plain, said = json.loads(text)
    arrays = {
        name: np.frombuffer(base64.b64decode(raw), dtype).reshape(shape)
        for name, (dtype, shape, raw) in said.items()
    }
    return joined(plain, arrays)


def _is_real(dtype: Any) -> bool:
    """Whether it is of booleans, integers or floats, bfloat16 too."""
    return dtype.kind in "biuf" or (
        dtype.kind == "V" and jnp.issubdtype(dtype, np.number)
    )


def _plain(value: Any) -> Any:
    """Without subclasses (of numpy's float64, for one)."""
    if isinstance(value, bool) or value is None:
        return value
    kinds = (int, float, str)
    return next(kind(value) for kind in kinds if isinstance(value, kind))


def _target(variable: keras.Variable, mesh: ReplicaMesh | None) -> Any:
    shape, dtype = tuple(variable.shape), variable.value.dtype
    sharding = _home(variable, mesh)
    if jax.process_count() > 1 and sharding.is_fully_addressable:
        # Every process has one of its own, and gets the chief's value.
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _home(variable: keras.Variable, mesh: ReplicaMesh | None) -> Any:
    if mesh is not None:
        return sharding_of(variable, mesh)
    return variable.value.sharding


def _pairs(
    saved: Mapping[str, Any], present: Mapping[str, keras.Variable]
) -> dict[str, keras.Variable] | None:
    """The variable for each saved name; None if they do not match."""
    if set(saved) == set(present):
        return {name: present[name] for name in saved}
    without = list(map(without_numbers, saved))
    if without != list(map(without_numbers, present)):
        return None
    return dict(zip(saved, present.values(), strict=True))


def _differences(
    group: str, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> list[str]:
    missing = [name for name in saved if name not in present]
    added = [name for name in present if name not in saved]
    return [f"{group} {name}: not in the model" for name in missing] + [
        f"{group} {name}: not in the checkpoint" for name in added
    ]
