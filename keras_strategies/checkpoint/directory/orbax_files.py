"""Orbax's own JSON in a checkpoint, which is not trusted."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_strategies.checkpoint.directory.corruption import damaged, shown
from keras_strategies.checkpoint.directory.files import load_object, reported
from keras_strategies.checkpoint.directory.verify import reading
from keras_strategies.cluster.untrusted import printable

MAX_BYTES = 64 << 20
"""The longest file that is read."""

_STATE = "state"
_TREE = f"{_STATE}/_METADATA"
_ARRAYS = f"{_STATE}/array_metadatas"
_CURE = (
    "It is not restored. Use an earlier step, or restore this folder from a "
    "copy."
)
_MAX_SHOWN = 1000
# What Orbax raises where its JSON has other entries than it writes; not what
# a disk, a device or another process raises.
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileNotFoundError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@contextlib.contextmanager
def restoring(
    path: str | os.PathLike[str], names: Mapping[str, Iterable[str]]
) -> Iterator[None]:
    """Wraps Orbax's reading of a checkpoint's arrays.

    Orbax reads its files without limits, takes their entries on trust, and
    leaves out an array that is not in them: they are checked before, and what
    it raises about them is named.

    Args:
      path: The checkpoint's folder.
      names: The names of the arrays that are read, by group.

    Raises:
      DamagedCheckpoint: they are not as Orbax writes them, or an array is
        not in them; or the checkpoint was deleted while it was read.
    """
    path = pathlib.Path(path)
    with reading(path):
        known = _names_in(_load(path, _TREE))
        for group, wanted in names.items():
            if not known.issuperset((group, name) for name in wanted):
                raise damaged(path, _TREE, f"it lacks arrays of {shown(group)}")
        for name in _array_files(path):
            _load(path, name)
        try:
            yield
        except _FAULTS as error:
            text = printable(str(error)[:_MAX_SHOWN])
            fault = f"Orbax cannot read it: {type(error).__name__}: {text}"
            raise damaged(path, _STATE, fault, _CURE) from error


def _array_files(path: pathlib.Path) -> list[str]:
    if not os.path.lexists(path / _ARRAYS):
        return []
    with reported(path, _ARRAYS):
        return [f"{_ARRAYS}/{n}" for n in sorted(os.listdir(path / _ARRAYS))]


def _load(path: pathlib.Path, name: str) -> dict[str, Any]:
    return load_object(path, name, MAX_BYTES, "JSON as Orbax writes it")


def _names_in(content: dict[str, Any]) -> set[tuple[str, ...]]:
    """Returns where arrays are in the tree; entries of other forms are none."""
    tree = content.get("tree_metadata")
    found = set()
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if isinstance(keys, list) and all(isinstance(k, dict) for k in keys):
            found.add(tuple(str(k.get("key")) for k in keys))
    return found
