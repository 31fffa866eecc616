"""The contents of a checkpoint: arrays by group and name, and a JSON document.

The arrays are what `weights`, `optimizer` and so on are made of, under the
paths of their variables, so that plain Orbax reads them. The document says
all else; arrays in it (a callback's best weights) are a group of their own.
"""

import os
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
from keras_strategies.checkpoint.directory import verify
from keras_strategies.checkpoint.directory.documents import (
    VERSION,
    read_document,
)
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


def processes_of(groups: Groups) -> tuple[int, ...]:
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


def document_of(path: str | os.PathLike[str]) -> Document:
    """What a checkpoint holds beside arrays, and the shapes of these.

    Args:
      path: The checkpoint's folder.

    Raises:
      DamagedCheckpoint: it is no document.
      ValueError: another version has written it.
    """
    with verify.reading(path):
        document = read_document(path)
    version = document.get("version")
    if version != VERSION:
        raise ValueError(
            "A checkpoint is read by the version of keras_strategies that "
            f"knows its format. Received: {os.fspath(path)} of format "
            f"{ascii(version)[:80]}, known is {VERSION}. Install the version "
            "that wrote it."
        )
    return document


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
        else:
            faults += _other_kinds(group, saved, pairs)
            found[group] = pairs
    if faults:
        raise _of_another_model(where, faults)
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
        kind = _kind_of(variable)
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
    sharding = variable.value.sharding
    if mesh is not None:
        sharding = sharding_of(variable, mesh)
    if jax.process_count() > 1 and sharding.is_fully_addressable:
        # Every process has one of its own, and gets the chief's value.
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


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


def _kind_of(variable: keras.Variable) -> list[Any]:
    """The shape and dtype of a variable, as a document has them."""
    return [list(variable.shape), str(variable.value.dtype)]


def _other_kinds(
    group: str, saved: Mapping[str, Any], pairs: Mapping[str, keras.Variable]
) -> list[str]:
    """What is wrong with the shapes and dtypes of variables."""
    kinds = [(name, saved[name], _kind_of(pairs[name])) for name in pairs]
    return [
        f"{group} {name}: {there[1]}{there[0]} in the checkpoint, "
        f"{here[1]}{here[0]} here"
        for name, there, here in kinds
        if there != here
    ]


def _of_another_model(where: str, faults: list[str]) -> ValueError:
    groups = {fault.partition(" ")[0] for fault in faults}
    what = "model" if _WEIGHTS in groups else " or ".join(sorted(groups))
    more = len(faults) - _MAX_SHOWN
    return ValueError(
        "A checkpoint is restored into a model with the same variables. "
        f"Received: {where}, which is of another {what}: "
        f"{'; '.join(faults[:_MAX_SHOWN])}"
        f"{f'; and {more} more' if more > 0 else ''}. Make the model as "
        "it was, or give another directory to this one."
    )


def _differences(
    group: str, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> list[str]:
    return [
        *(f"{group} {n}: not in the model" for n in saved if n not in present),
        *(
            f"{group} {n}: not in the checkpoint"
            for n in present
            if n not in saved
        ),
    ]
