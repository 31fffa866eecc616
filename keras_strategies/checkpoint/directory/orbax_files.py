"""Checking Orbax's JSON files in a checkpoint, which are not trusted."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_strategies.checkpoint.directory.corruption import (
    make_damage_error,
    quote_name,
)
from keras_strategies.checkpoint.directory.files import (
    load_object,
    translate_errors,
)
from keras_strategies.checkpoint.directory.verify import guard_read
from keras_strategies.cluster.untrusted import escape_controls

MAX_BYTES = 64 << 20
"""The maximum size of a file."""

_STATE = "state"
_TREE = f"{_STATE}/_METADATA"
_ARRAYS = f"{_STATE}/array_metadatas"
_CURE = (
    "This checkpoint is not restored. Use an earlier step, or restore this "
    "folder from a copy."
)
_MAX_SHOWN = 1000
# Errors that Orbax raises if its JSON files have unexpected entries. Errors of
# the disk, of a device or of another process are not among them.
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
def guard_restore(
    path: str | os.PathLike[str], names: Mapping[str, Iterable[str]]
) -> Iterator[None]:
    """Checks a checkpoint's files, then converts Orbax's errors in the block.

    Orbax reads its JSON files without a size limit, trusts their entries, and
    silently omits arrays that the files do not list. So the files are checked
    before the block runs, and errors that Orbax raises about them in the block
    are converted to DamagedCheckpoint.

    Args:
      path: The checkpoint's folder.
      names: The names of the arrays to read, by group.

    Raises:
      DamagedCheckpoint: if the files are not in Orbax's format, if an array is
        missing, or if the checkpoint was deleted while it was read.
    """
    path = pathlib.Path(path)
    with guard_read(path):
        known = _find_names(_load(path, _TREE))
        for group, wanted in names.items():
            if not known.issuperset((group, name) for name in wanted):
                raise make_damage_error(
                    path, _TREE, f"arrays of {quote_name(group)} are missing"
                )
        for name in _list_array_files(path):
            _load(path, name)
        try:
            yield
        except _FAULTS as error:
            text = escape_controls(str(error)[:_MAX_SHOWN])
            fault = f"Orbax cannot read it: {type(error).__name__}: {text}"
            raise make_damage_error(path, _STATE, fault, _CURE) from error


def _list_array_files(path: pathlib.Path) -> list[str]:
    if not os.path.lexists(path / _ARRAYS):
        return []
    with translate_errors(path, _ARRAYS):
        return [f"{_ARRAYS}/{n}" for n in sorted(os.listdir(path / _ARRAYS))]


def _load(path: pathlib.Path, name: str) -> dict[str, Any]:
    return load_object(path, name, MAX_BYTES, "JSON file of Orbax")


def _find_names(content: dict[str, Any]) -> set[tuple[str, ...]]:
    """Returns the paths of all listed arrays; ignores malformed entries."""
    tree = content.get("tree_metadata")
    names = set()
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if isinstance(keys, list) and all(isinstance(k, dict) for k in keys):
            names.add(tuple(str(k.get("key")) for k in keys))
    return names
