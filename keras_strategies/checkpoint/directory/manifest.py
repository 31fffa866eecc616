"""A checkpoint's manifest: the size and checksum of each of its files.

The manifest is written last and atomically, so a checkpoint without a manifest
is an unfinished save. It contains a checksum of itself and has a single
canonical form, so that a change in any byte is detected. This does not protect
against an attacker with write access to the directory: a checksum is not a
signature.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from keras_strategies.checkpoint.directory.files import (
    check_directory,
    compute_digest,
    find_files,
    flush,
    make_damage_error,
    open_file,
)
from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    parse_step,
    saving_path,
    step_path,
)
from keras_strategies.cluster.exchange.message_forms import (
    has_form,
    is_count,
    load_form,
)

VERSION = 1
"""The version of the manifest's format."""

MAX_BYTES = 16 << 20
"""The maximum length of a manifest, in bytes."""

_PARTIAL = (
    "This checkpoint is not restored. Use an earlier step. If no run is saving "
    "it at the moment, its directory can be deleted."
)
_NEWER = (
    "Another version of keras_strategies may have written this checkpoint. "
    "Restore it with that version, or use an earlier step."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of a checkpoint's files, with metadata about the checkpoint.

    Attributes:
      version: The version of the manifest's format.
      step: The number of train steps completed.
      created: The time of the save, in seconds since 1970 (UTC).
      files: The size in bytes and the sha256 (in hexadecimal digits) of each
        file except the manifest, by the file's name relative to the
        checkpoint's directory, with `/` as the separator.
      facts: Metadata as JSON, used by listings and by `retention.py`: "logs"
        (metrics), "epoch", "started" and "num_processes". Numbers that JSON
        cannot represent are strings: "NaN", "Infinity", "-Infinity".
    """

    version: int = VERSION
    step: int
    created: float
    files: Mapping[str, tuple[int, str]]
    facts: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """The size of all files except the manifest."""
        return sum(size for size, _ in self.files.values())


def _are_files(value: object) -> bool:
    return isinstance(value, dict) and has_form(
        [*value.values()], [(is_count, str)]
    )


def _is_float(value: object) -> bool:
    return type(value) is float  # An int could be too large for a date.


_FORM = {"step": int, "created": _is_float, "files": _are_files, "facts": dict}


def complete_save(
    directory: str | os.PathLike[str], step: int, facts: Mapping[str, Any]
) -> Manifest:
    """Completes a checkpoint, and renames its directory to its step.

    If the process is killed, it leaves no directory that looks like a damaged
    checkpoint.

    Args:
      directory: The directory of checkpoints. It contains the checkpoint at
        `names.saving_path`.
      step: The number of train steps completed.
      facts: See `write_manifest`.

    Raises:
      DamagedCheckpoint, TypeError, ValueError: see `write_manifest`.
      OSError: if the manifest cannot be written, or the step's directory
        exists.
    """
    saving = saving_path(directory, step)
    manifest = write_manifest(saving, step, facts)
    os.rename(saving, step_path(directory, step))
    flush(saving.parent)
    return manifest


def write_manifest(
    path: str | os.PathLike[str],
    step: int,
    facts: Mapping[str, Any],
    *,
    created: float | None = None,
) -> Manifest:
    """Completes a checkpoint: hashes its files and writes its manifest.

    On return, all files are on disk, and the checkpoint is good. Only one
    process must call this function, after all processes have written their
    files. It reads every file once (1 GB takes about a second).

    Args:
      path: The checkpoint's directory.
      step: The number of train steps completed.
      facts: Short metadata as JSON (see `Manifest.facts`); it may contain numpy
        numbers.
      created: The time of the save, in seconds since 1970 (UTC); None for now.

    Raises:
      DamagedCheckpoint: if the directory is missing, or contains a link, a pipe
        or another special file; or if `facts` is too long or nested too deeply.
      TypeError: if a value in `facts` cannot be converted to JSON.
      OSError: if the manifest cannot be written.
    """
    path = pathlib.Path(path)
    sizes = find_files(path)
    # JSON has no NaN and no infinity, so these numbers become strings.
    plain_facts = json.loads(
        json.dumps(dict(facts), default=_to_list), parse_constant=str
    )
    text = _serialize(
        Manifest(
            step=int(step),
            created=time.time() if created is None else float(created),
            files={
                name: (size, compute_digest(path, name))
                for name, size in sorted(sizes.items())
            },
            facts=plain_facts,
        )
    )
    manifest = _parse(path, text)  # A manifest must be readable.
    names = {path / name for name in sizes}
    for flushed in sorted(names | {name.parent for name in names}):
        flush(flushed)
    _write(path, text)
    return manifest


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Reads a checkpoint's manifest, without reading the other files.

    Args:
      path: The checkpoint's directory.

    Raises:
      DamagedCheckpoint: if the manifest is missing (the save did not finish),
        has another step or version, or was changed after it was written.
    """
    path = pathlib.Path(path)
    check_directory(path)
    if not os.path.lexists(path / MANIFEST):
        check_directory(path)  # The directory may have just been deleted.
        problem = "it is missing: the save did not finish"
        raise make_damage_error(path, MANIFEST, problem, _PARTIAL)
    with open_file(path, MANIFEST) as file:
        text = file.read(MAX_BYTES + 1) or b""
    manifest = _parse(path, text)
    if manifest.step != parse_step(path.name):
        problem = f"it is the manifest of step {manifest.step}"
        raise make_damage_error(path, MANIFEST, problem)
    return manifest


def _serialize(manifest: Manifest) -> bytes:
    content = dataclasses.asdict(manifest)
    content["checksum"] = hashlib.sha256(_dump(content)).hexdigest()
    return _dump(content) + b"\n"


def _dump(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, allow_nan=False, indent=1)
    return text.encode("ascii")


def _write(path: pathlib.Path, text: bytes) -> None:
    """Writes the manifest of a directory to the disk, before it is renamed."""
    with open(path / MANIFEST, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush(path)
    flush(path.parent)


def _parse(path: pathlib.Path, text: bytes) -> Manifest:
    make_error = functools.partial(make_damage_error, path, MANIFEST)
    try:
        content = load_form(text, {"version": int}, max_characters=MAX_BYTES)
    except ValueError as error:
        raise make_error(f"it is not a valid manifest: {error}") from None
    if content["version"] != VERSION:
        raise make_error(f"its version is not {VERSION}", _NEWER)
    if not has_form(content, _FORM):
        raise make_error("it is not a valid manifest: a wrong structure")
    files = content["files"].items()
    manifest = Manifest(
        step=content["step"],
        created=content["created"],
        files={name: tuple(entry) for name, entry in files},
        facts=content["facts"],
    )
    # Compares all bytes, so that changes in whitespace or order are detected,
    # too.
    if _serialize(manifest) != text:
        raise make_error(
            "its checksum differs: it was changed after it was written"
        )
    return manifest


def _to_list(value: Any) -> Any:
    """Converts the numbers and arrays of numpy and jax for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        "The metadata of a checkpoint must be JSON: numbers, strings, lists "
        f"and mappings. Received: an object of type {type(value).__name__}. "
        "Convert it to a number or a string."
    )
