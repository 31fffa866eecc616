"""Verification of checkpoints."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_strategies.checkpoint.directory.files import (
    DamagedCheckpoint,
    compute_digest,
    find_files,
    load_object,
    make_damage_error,
    quote_name,
    translate_errors,
)
from keras_strategies.checkpoint.directory.manifest import (
    Manifest,
    read_manifest,
)
from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    find_steps,
    step_path,
)
from keras_strategies.cluster.untrusted import escape_controls

MAX_BYTES = 64 << 20
"""The maximum size of a file."""

_STATE = "state"
_TREE = f"{_STATE}/_METADATA"
_ARRAYS = f"{_STATE}/array_metadatas"
_KIND = "JSON file of Orbax"
_FIX = (
    "This checkpoint is not restored. Use an earlier step, or restore this "
    "directory from a copy."
)
_MAX_SHOWN = 1000
# Errors that Orbax raises if its JSON files have unexpected entries. Errors of
# the disk, of a device or of another process are not among them.
_PROBLEMS = (
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
      path: The checkpoint's directory.
      names: The names of the arrays to read, by group.

    Raises:
      DamagedCheckpoint: if the files are not in Orbax's format, if an array is
        missing, or if the checkpoint was deleted while it was read.
    """
    path = pathlib.Path(path)
    with guard_read(path):
        known = _find_names(load_object(path, _TREE, MAX_BYTES, _KIND))
        for group, wanted in names.items():
            if not known.issuperset((group, name) for name in wanted):
                raise make_damage_error(
                    path, _TREE, f"arrays of {quote_name(group)} are missing"
                )
        for name in _list_array_files(path):
            load_object(path, name, MAX_BYTES, _KIND)
        try:
            yield
        except _PROBLEMS as error:
            text = escape_controls(str(error)[:_MAX_SHOWN])
            problem = f"Orbax cannot read it: {type(error).__name__}: {text}"
            raise make_damage_error(path, _STATE, problem, _FIX) from error


def _list_array_files(path: pathlib.Path) -> list[str]:
    if not os.path.lexists(path / _ARRAYS):
        return []
    with translate_errors(path, _ARRAYS):
        return [f"{_ARRAYS}/{n}" for n in sorted(os.listdir(path / _ARRAYS))]


def _find_names(content: dict[str, Any]) -> set[tuple[str, ...]]:
    """Returns the paths of all listed arrays; ignores malformed entries."""
    tree = content.get("tree_metadata")
    names = set()
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if isinstance(keys, list) and all(isinstance(k, dict) for k in keys):
            names.add(tuple(str(k.get("key")) for k in keys))
    return names


def verify(path: str | os.PathLike[str], *, is_quick: bool = False) -> Manifest:
    """Checks that a checkpoint has not changed since it was saved.

    Must be called before anything else reads the checkpoint. It is safe for
    untrusted checkpoints: it follows no links, and uses the contents of files
    only to compute checksums.

    Args:
      path: The checkpoint's directory. Its name must be the step.
      is_quick: Whether to compare only the names and sizes of files. To compare
        checksums, every file must be read once (1 GB takes about a second).

    Returns:
      The checkpoint's manifest.

    Raises:
      DamagedCheckpoint: if a file is missing, was changed, is not in the
        manifest, or is a link or a pipe; or if the manifest is missing or was
        changed. The message names the file.
    """
    path = pathlib.Path(path)
    manifest = read_manifest(path)
    sizes = find_files(path)
    for name in sorted(manifest.files.keys() | sizes.keys()):
        if name not in manifest.files:
            raise make_damage_error(path, name, "it is not in the manifest")
        if name not in sizes:
            raise make_damage_error(path, name, "it is missing")
        size = manifest.files[name][0]
        if sizes[name] != size:
            problem = f"it has {sizes[name]} bytes instead of {size}"
            raise make_damage_error(path, name, problem)
    if is_quick:
        return manifest
    for name, (_, checksum) in manifest.files.items():
        if compute_digest(path, name) != checksum:
            raise make_damage_error(path, name, "its checksum differs")
    return manifest


def find_newest_good(
    directory: str | os.PathLike[str], *, is_quick: bool = False
) -> tuple[Manifest | None, list[DamagedCheckpoint]]:
    """Finds the newest good checkpoint.

    Args:
      directory: The directory of checkpoints; it need not exist.
      is_quick: See `verify`.

    Returns:
      The manifest of the newest good checkpoint, or None if none exists; and
      the errors for newer, damaged checkpoints, newest first.
    """
    problems: list[DamagedCheckpoint] = []
    for step in reversed(find_steps(directory)):
        try:
            path = step_path(directory, step)
            return verify(path, is_quick=is_quick), problems
        except DamagedCheckpoint as error:
            problems.append(error)
    return None, problems


@contextlib.contextmanager
def guard_read(path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts errors if a checkpoint is deleted while the block reads it.

    Raises:
      DamagedCheckpoint: if the block fails and the checkpoint no longer exists.
    """
    try:
        yield
    except Exception as error:
        if os.path.lexists(pathlib.Path(path) / MANIFEST):
            raise
        problem = "it was deleted while it was read"
        raise make_damage_error(path, None, problem) from error
