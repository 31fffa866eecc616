"""A checkpoint's manifest: the size and checksum of each of its files.

The manifest is written last and atomically, so a checkpoint without a manifest
is an unfinished save. It contains a checksum of itself and has a single
canonical form, so that a change in any byte is detected. This does not protect
against an attacker with write access to the directory: a checksum is not a
signature.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from keras_strategies._types import Tree
from keras_strategies.checkpoint.directory.files import (
    DamagedCheckpoint,
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
    find_problem,
    is_count,
)
from keras_strategies.cluster.untrusted import load_json

VERSION = 1
"""The version of the manifest's format."""

MAX_BYTES = 16 << 20
"""The maximum length of a manifest, in bytes."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
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


def _is_step(value: object) -> bool:
    return type(value) is int and parse_step(str(value)) is not None


_FORM = {
    "version": int,
    "step": _is_step,
    "created": lambda value: type(value) is float,
    "files": dict,
    "facts": dict,
    "checksum": object,
}


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
      path: The checkpoint's directory. Its name must be the step, or that of
        `names.saving_path`.
      step: The number of train steps completed.
      facts: Short metadata as JSON (see `Manifest.facts`); it may contain numpy
        numbers.
      created: The time of the save, in seconds since 1970 (UTC); None for now.

    Raises:
      DamagedCheckpoint: if the directory is missing, or contains a link, a pipe
        or another special file.
      TypeError: if a value in `facts` cannot be converted to JSON.
      ValueError: if the directory's name is not the step, or `facts` is too
        long.
      OSError: if the manifest cannot be written.
    """
    path = pathlib.Path(path)
    directories = (step_path(path.parent, step), saving_path(path.parent, step))
    if path.name not in [directory.name for directory in directories]:
        raise ValueError(
            "A checkpoint's directory must be named after its step. Received: "
            f"step={step}, path={str(path)!r}. Pass the directory of that step."
        )
    sizes = find_files(path)
    manifest = Manifest(
        step=int(step),
        created=time.time() if created is None else float(created),
        files={
            name: (size, compute_digest(path, name))
            for name, size in sorted(sizes.items())
        },
        facts={name: _to_json(value, name) for name, value in facts.items()},
    )
    text = _serialize(manifest)
    try:
        load_json(text, max_characters=MAX_BYTES)
    except ValueError as error:
        raise ValueError(
            "A checkpoint's manifest must be short, valid JSON. Received: a "
            f"manifest for {len(sizes)} files; {error}. Shorten or "
            "simplify the metadata in `facts`."
        ) from None
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
    def make_error(problem: str, *fix: str) -> DamagedCheckpoint:
        return make_damage_error(path, MANIFEST, problem, *fix)

    if not text:
        raise make_error("it is empty")
    try:
        content = load_json(text, max_characters=MAX_BYTES)
    except ValueError as error:
        raise make_error(f"it is not a valid manifest: {error}") from None
    if not isinstance(content, dict) or "version" not in content:
        raise make_error("it has no version")
    if content["version"] != VERSION or isinstance(content["version"], bool):
        raise make_error(f"its version is not {VERSION}", _NEWER)
    problem = "its keys are not those of a manifest"
    if set(content) == set(_FORM):
        problem = find_problem(content, _FORM) or find_problem(
            list(content["files"].values()), [(is_count, _is_sha256)], "files"
        )
    if problem is not None:
        raise make_error(problem)
    del content["checksum"]
    files = {name: tuple(entry) for name, entry in content["files"].items()}
    content |= {"files": files}
    manifest = Manifest(**content)
    # Compares all bytes, so that changes in whitespace or order are detected,
    # too.
    if _serialize(manifest) != text:
        raise make_error(
            "its checksum differs: it was changed after it was written"
        )
    return manifest


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _to_json(value: Tree, name: str) -> Tree:
    """Converts a value in `Manifest.facts` to JSON."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(part, name) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(part, name) for part in value]
    if hasattr(value, "tolist"):  # Numbers and arrays of numpy and jax.
        return _to_json(value.tolist(), name)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return (
            "NaN"
            if math.isnan(value)
            else f"{value}".replace("inf", "Infinity")
        )
    raise TypeError(
        "The metadata of a checkpoint must be JSON: numbers, strings, lists "
        f"and mappings. Received: an object of type {type(value).__name__} in "
        f"{name!r}. Convert it to a number or a string."
    )
