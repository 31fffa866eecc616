"""The contents of a checkpoint: arrays by group and name, and a JSON document.

The arrays are what `weights`, `optimizer` and so on are made of, under the
paths of their variables, so that plain Orbax reads them. The document says
all else; arrays in it (a callback's best weights) are a group of their own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import set_apart
from keras_strategies._types import Tree
from keras_strategies.checkpoint import nests
from keras_strategies.checkpoint.directory.documents import VERSION
from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.array_kinds import dtype_named
from keras_strategies.keras_bridge.variables.shardings import sharding_of

Groups = Mapping[str, Sequence[keras.Variable]]
Arrays = dict[str, dict[str, Any]]
Document = dict[str, Any]

STATE = "state_arrays"
"""The group of the arrays that the document's state holds."""

_WEIGHTS = "weights"
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


def packed(groups: Groups, state: Tree) -> tuple[Arrays, Document]:
    """Returns the arrays and the document of a checkpoint, to be saved.

    Args:
      groups: The variables.
      state: All else: nests of what JSON can hold and numpy arrays.
    """
    state, extra = nests.split(state)
    arrays = arrays_of(groups)
    if extra or not arrays:
        # Orbax keeps no tree without any array.
        arrays[STATE] = extra or {"none": np.zeros(1)}
    variables = described(arrays)
    document = {"version": VERSION, "variables": variables, "state": state}
    return arrays, document


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
        kind = dtype_named(dtype)
        if kind is None:
            raise ValueError(
                "A checkpoint holds arrays of known dtypes. "
                f"Received: {shown(dtype)}. Use an earlier checkpoint, or the "
                "versions of jax and numpy that wrote it."
            )
        wanted.setdefault(STATE, {})[name] = np.empty(shape, kind)
    return wanted


def assign(
    found: Mapping[str, Mapping[str, keras.Variable]], arrays: Arrays
) -> None:
    """Gives variables the values that were restored for them."""
    for group, entries in found.items():
        for name, variable in entries.items():
            variable.assign(arrays[group][name])


def _target(
    variable: keras.Variable, mesh: ReplicaMesh | None
) -> np.ndarray | jax.ShapeDtypeStruct:
    shape, dtype = tuple(variable.shape), variable.value.dtype
    sharding = _home(variable, mesh)
    if jax.process_count() > 1 and sharding.is_fully_addressable:
        # Every process has one of its own, and gets the chief's value.
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _home(
    variable: keras.Variable, mesh: ReplicaMesh | None
) -> jax.sharding.Sharding:
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
