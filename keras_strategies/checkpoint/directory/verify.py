"""The verification of the checkpoints of a directory."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint,
    damaged,
)
from keras_strategies.checkpoint.directory.files import digest, find_files
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
    "Somebody's keep rule, or a person, has deleted it. Use the newest "
    "checkpoint that is there."
)


def verify(path: str | os.PathLike[str], *, is_quick: bool = False) -> Manifest:
    """Checks that a checkpoint is what was saved.

    To be called before anything else reads it: no link in it is followed, and
    nothing of a file's content is used but its checksum.

    Args:
      path: The checkpoint's folder, named by its step.
      is_quick: Whether to compare names and sizes alone, not checksums, for
        which every file is read once (1 GB in about a second).

    Returns:
      Its manifest.

    Raises:
      DamagedCheckpoint: a file is missing, changed, not in the manifest, a
        link or a pipe; or the manifest is missing or changed. The text names
        the file.
    """
    path = pathlib.Path(path)
    manifest = read_manifest(path)
    sizes = find_files(path)
    for name in sorted(manifest.files.keys() | sizes.keys()):
        if name not in manifest.files:
            raise damaged(path, name, "it is not in the manifest")
        if name not in sizes:
            raise damaged(path, name, "it is missing")
        size = manifest.files[name][0]
        if sizes[name] != size:
            fault = f"it has {sizes[name]} bytes in place of {size}"
            raise damaged(path, name, fault)
    if is_quick:
        return manifest
    for name, (_, checksum) in manifest.files.items():
        if digest(path, name) != checksum:
            raise damaged(path, name, "its checksum differs")
    return manifest


def newest_good(
    directory: str | os.PathLike[str],
) -> tuple[Manifest | None, list[DamagedCheckpoint]]:
    """Finds the newest checkpoint that is good.

    Args:
      directory: Where checkpoints are; it need not exist.

    Returns:
      Its manifest, None if there is none; and what is wrong with those that
      are newer, newest first.
    """
    faults: list[DamagedCheckpoint] = []
    for step, _ in reversed(find_entries(directory)):
        try:
            return verify(step_path(directory, step)), faults
        except DamagedCheckpoint as error:
            faults.append(error)
    return None, faults


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around code that reads a checkpoint: says so if it is deleted meanwhile.

    Raises:
      DamagedCheckpoint: the code failed, and the checkpoint is gone.
    """
    try:
        yield
    except Exception as error:
        if os.path.lexists(pathlib.Path(path) / MANIFEST):
            raise
        fault = "it was deleted while it was read"
        raise damaged(path, None, fault, _DELETED) from error
