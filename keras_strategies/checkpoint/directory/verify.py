"""Verification of checkpoints."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint,
    make_damage_error,
)
from keras_strategies.checkpoint.directory.files import (
    compute_digest,
    find_files,
)
from keras_strategies.checkpoint.directory.manifest import (
    Manifest,
    read_manifest,
)
from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    find_entries,
    step_path,
)

_DELETED = (
    "A run that retains only some checkpoints, or a user, has deleted it. Use "
    "the newest checkpoint that still exists."
)


def verify(path: str | os.PathLike[str], *, is_quick: bool = False) -> Manifest:
    """Checks that a checkpoint has not changed since it was saved.

    Must be called before anything else reads the checkpoint. It is safe for
    untrusted checkpoints: it follows no links, and uses the contents of files
    only to compute checksums.

    Args:
      path: The checkpoint's folder. Its name must be the step.
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
            fault = f"it has {sizes[name]} bytes instead of {size}"
            raise make_damage_error(path, name, fault)
    if is_quick:
        return manifest
    for name, (_, checksum) in manifest.files.items():
        if compute_digest(path, name) != checksum:
            raise make_damage_error(path, name, "its checksum differs")
    return manifest


def find_newest_good(
    directory: str | os.PathLike[str],
) -> tuple[Manifest | None, list[DamagedCheckpoint]]:
    """Finds the newest good checkpoint.

    Args:
      directory: The directory of checkpoints; it need not exist.

    Returns:
      The manifest of the newest good checkpoint, or None if none exists; and
      the errors for newer, damaged checkpoints, newest first.
    """
    faults: list[DamagedCheckpoint] = []
    for step, _ in reversed(find_entries(directory)):
        try:
            return verify(step_path(directory, step)), faults
        except DamagedCheckpoint as error:
            faults.append(error)
    return None, faults


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
        fault = "it was deleted while it was read"
        raise make_damage_error(path, None, fault, _DELETED) from error
