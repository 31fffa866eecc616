"""The contents of a checkpoint: arrays by group and name, and a JSON document.

The arrays are the values of variables. They are in groups such as `weights`
and `optimizer`, and are named by the paths of their variables, so that plain
Orbax can read them. The document contains everything else. Arrays that belong
to the document (such as a callback's best weights) form a separate group.
"""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.checkpoint import nests
from keras_strategies.checkpoint.directory import verify
from keras_strategies.checkpoint.directory.files import (
    load_object,
    make_damage_error,
)
from keras_strategies.checkpoint.directory.names import RUN
from keras_strategies.cluster.addresses import shorten
from keras_strategies.cluster.array_kinds import (
    is_dtype_name,
    is_shape,
    parse_dtype,
)
from keras_strategies.cluster.exchange.message_forms import has_form
from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.values import set_apart
from keras_strategies.variables.shardings import get_sharding

Groups = Mapping[str, Sequence[keras.Variable]]
Arrays = dict[str, dict[str, Any]]
Document = dict[str, Any]

VERSION = 1
"""The version of documents that this code reads and writes."""

MAX_BYTES = 64 << 20
"""The maximum length of a document, in bytes."""

STATE = "state_arrays"
"""The group of the arrays that belong to the document's state."""

_WEIGHTS = "weights"
_MAX_SHOWN = 8


def collect_arrays(groups: Groups) -> Arrays:
    """Collects the values of variables by group and name, to be saved."""
    return {
        group: {n: set_apart(v.value) for n, v in name_variables(vs).items()}
        for group, vs in groups.items()
        if vs
    }


def find_processes(groups: Groups) -> tuple[int, ...]:
    """Returns the sorted JAX ids of the processes that have the variables."""
    if dry_run.get() is not None:
        return (jax.process_index(),)
    indices = {
        device.process_index
        for variables in groups.values()
        for variable in variables
        for device in variable.value.sharding.device_set
    }
    return tuple(sorted(indices)) or (jax.process_index(),)


def name_variables(
    variables: Sequence[keras.Variable],
) -> dict[str, keras.Variable]:
    """Maps the dotted paths of variables to the variables.

    If several variables have the same path, a number is appended to it ("~1").
    Variables of size zero are left out, since Orbax does not store them.
    """
    by_name: dict[str, keras.Variable] = {}
    for variable in variables:
        if not variable.value.size:
            continue
        path = name = variable.path.replace("/", ".")
        number = 1
        while name in by_name:
            name = f"{path}~{number}"
            number += 1
        by_name[name] = variable
    return by_name


def pack_checkpoint(groups: Groups, state: Tree) -> tuple[Arrays, Document]:
    """Builds the arrays and the document of a checkpoint, to be saved.

    Args:
      groups: The variables, by group.
      state: Everything else to be saved: a nest of JSON values and numpy
        arrays.
    """
    state, extra = nests.split(state)
    arrays = collect_arrays(groups)
    if extra or not arrays:
        # Orbax does not store a tree that contains no arrays.
        arrays[STATE] = extra or {"none": np.zeros(1)}
    variables = {
        group: {n: _describe_array(array) for n, array in entries.items()}
        for group, entries in arrays.items()
    }
    document = {"version": VERSION, "variables": variables, "state": state}
    return arrays, document


def load_document(path: str | os.PathLike[str]) -> Document:
    """Reads the document of a checkpoint on disk, which is not trusted.

    Args:
      path: The checkpoint's directory.

    Returns:
      The document: everything in the checkpoint except the values of its
      arrays. It has the keys "version", "variables", with the shape and dtype
      of each array by group and name, and "state".

    Raises:
      DamagedCheckpoint: if the document is missing or not valid.
      ValueError: if the document has a format version that is not supported.
    """
    path = pathlib.Path(path)
    with verify.guard_read(path):
        document = load_object(path, RUN, MAX_BYTES, "document")
        if "version" not in document:
            raise make_damage_error(path, RUN, "it has no version")
        version = document["version"]
        if version == VERSION and not _is_complete(document):
            problem = "its entries are not those of a checkpoint's document"
            raise make_damage_error(path, RUN, problem)
    if version != VERSION:
        raise ValueError(
            "A checkpoint must have a format that this version of "
            f"keras_strategies can read. Received: {os.fspath(path)} with "
            f"format {ascii(version)[:80]}, but this version reads format "
            f"{VERSION}. Install the version of keras_strategies that wrote "
            "the checkpoint."
        )
    return document


def _is_complete(document: Document) -> bool:
    if not has_form(document, {"state": object, "variables": dict}):
        return False
    return all(
        isinstance(group, dict)
        and has_form([*group.values()], [(is_shape, is_dtype_name)])
        for group in document["variables"].values()
    )


def match_variables(
    groups: Groups, document: Document, where: str
) -> dict[str, dict[str, keras.Variable]]:
    """Matches the arrays of a checkpoint with a model's variables.

    Keras numbers all layers that a process creates ("dense_1", "dense_2"), so
    the numbers may differ between processes. So names that differ only in these
    numbers are matched in the order of the variables.

    Args:
      groups: The variables to be restored.
      document: The checkpoint's document.
      where: The path of the checkpoint, for messages.

    Returns:
      The variable to restore from each array, by group and saved name.

    Raises:
      ValueError: if names, shapes or dtypes differ; the message lists the
        differences.
    """
    all_saved = document["variables"]
    problems: list[str] = []
    matches: dict[str, dict[str, keras.Variable]] = {}
    names = {group for group, variables in groups.items() if variables}
    # Weights are compared first: if they differ, this also explains
    # differences in other groups.
    for group in sorted(
        names | set(all_saved) - {STATE},
        key=lambda name: (name != _WEIGHTS, name),
    ):
        saved = all_saved.get(group, {})
        present = name_variables(groups.get(group, ()))
        pairs = _pair_variables(saved, present)
        if pairs is None:
            for name in [n for n in saved if n not in present]:
                problems.append(f"{group} {name}: not in the model")
            for name in [n for n in present if n not in saved]:
                problems.append(f"{group} {name}: not in the checkpoint")
        else:
            problems += _find_mismatches(group, saved, pairs)
            matches[group] = pairs
    if problems:
        raise _make_mismatch_error(where, problems)
    return matches


def select_arrays(
    saved: Mapping[str, Any], variables: Sequence[keras.Variable]
) -> dict[str, Any] | None:
    """Selects the saved arrays that belong to the given variables.

    The saved arrays must be in the order of the variables; other arrays may be
    between them.

    Args:
      saved: The shapes and dtypes of all saved arrays, by name.
      variables: The variables.

    Returns:
      The entries of `saved` for the variables; None if a variable has no entry
      with its name, shape and dtype.
    """
    selected: dict[str, Any] = {}
    entries = iter(saved.items())
    for name, variable in name_variables(variables).items():
        wanted = strip_numbers(name)
        kind = _describe_array(variable.value)
        # All searches use the same iterator `entries`, so that each search
        # continues after the entry that the previous one found.
        for other, entry in entries:
            if strip_numbers(other) == wanted and entry == kind:
                selected[other] = entry
                break
        else:
            return None
    return selected or None


def strip_numbers(name: str) -> str:
    """Removes the numbers that Keras appends to layer names from a path."""
    return re.sub(r"_\d+", "", name)


def make_targets(
    matches: Mapping[str, Mapping[str, keras.Variable]],
    document: Document,
    mesh: ReplicaMesh | None,
) -> Arrays:
    """Returns the shape, dtype and sharding of each array to restore.

    Numpy arrays stand for arrays that are restored to the host.
    """
    restored: Arrays = {
        group: {n: _make_target(v, mesh) for n, v in entries.items()}
        for group, entries in matches.items()
        if entries
    }
    for name, (shape, dtype) in document["variables"].get(STATE, {}).items():
        kind = parse_dtype(dtype)
        if kind is None:
            raise ValueError(
                "The arrays in a checkpoint must have dtypes that the "
                f"installed numpy and jax support. Received: {shorten(dtype)}. "
                "Install the versions that wrote the checkpoint, or use an "
                "earlier checkpoint."
            )
        restored.setdefault(STATE, {})[name] = np.empty(shape, kind)
    return restored


def assign(
    matches: Mapping[str, Mapping[str, keras.Variable]], arrays: Arrays
) -> None:
    """Assigns the restored values to the matching variables."""
    for group, entries in matches.items():
        for name, variable in entries.items():
            variable.assign(arrays[group][name])


def _make_target(
    variable: keras.Variable, mesh: ReplicaMesh | None
) -> np.ndarray | jax.ShapeDtypeStruct:
    shape, dtype = tuple(variable.shape), variable.value.dtype
    sharding = variable.value.sharding
    if mesh is not None:
        sharding = get_sharding(variable, mesh)
    if jax.process_count() > 1 and sharding.is_fully_addressable:
        # The variable is process-local; every process restores the value that
        # the chief saved.
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _pair_variables(
    saved: Mapping[str, Any], present: Mapping[str, keras.Variable]
) -> dict[str, keras.Variable] | None:
    """Pairs saved names with variables; returns None if they do not match."""
    if set(saved) == set(present):
        return {name: present[name] for name in saved}
    without = list(map(strip_numbers, saved))
    if without != list(map(strip_numbers, present)):
        return None
    return dict(zip(saved, present.values(), strict=True))


def _describe_array(array: Array) -> list[Any]:
    """Returns an array's shape and dtype as a document contains them."""
    return [list(array.shape), str(array.dtype)]


def _find_mismatches(
    group: str, saved: Mapping[str, Any], pairs: Mapping[str, keras.Variable]
) -> list[str]:
    """Lists the variables whose shape or dtype differs from the saved one."""
    return [
        f"{group} {name}: {there[1]}{there[0]} in the checkpoint, "
        f"{here[1]}{here[0]} here"
        for name, variable in pairs.items()
        if (there := saved[name]) != (here := _describe_array(variable.value))
    ]


def _make_mismatch_error(where: str, problems: list[str]) -> ValueError:
    groups = {problem.partition(" ")[0] for problem in problems}
    what = "model" if _WEIGHTS in groups else " or ".join(sorted(groups))
    more = len(problems) - _MAX_SHOWN
    return ValueError(
        "A checkpoint must be restored into a model with the same variables. "
        f"Received: {where}, which was saved with another {what}: "
        f"{'; '.join(problems[:_MAX_SHOWN])}"
        f"{f'; and {more} more' if more > 0 else ''}. Build the same model as "
        "when it was saved, or use another directory for this model."
    )
