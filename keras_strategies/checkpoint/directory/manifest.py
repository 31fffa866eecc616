"""A checkpoint's manifest: the size and checksum of each of its files.

It is written last and in one go, so a checkpoint without one is a save that
did not end; and it has a checksum of itself, and one way to be written, so that
no byte of it can change unnoticed. None of this is against somebody who can
write to the directory: a checksum is no signature.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from keras_strategies._types import Tree
from keras_strategies.checkpoint.directory.corruption import damaged, shown
from keras_strategies.checkpoint.directory.files import (
    check_folder,
    digest,
    find_files,
    flush,
    open_file,
)
from keras_strategies.checkpoint.directory.names import (
    MANIFEST,
    step_of,
    step_path,
)
from keras_strategies.cluster.exchange.message_forms import fault_of, is_count
from keras_strategies.cluster.untrusted import load_json

VERSION = 1
"""The version of the format that is written."""

MAX_BYTES = 16 << 20
"""A longer manifest is refused."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PARTIAL = (
    "It is not restored. Use an earlier step. If no run is saving it, the "
    "folder can be deleted."
)
_NEWER = (
    "It may be of another version of keras_strategies. Restore it with the "
    "version that wrote it, or use an earlier step."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      version: The format's version.
      step: Train steps done.
      created: When it was written, in seconds since 1970 (UTC).
      files: (size in bytes, sha256 in hexadecimal digits) of each file but the
        manifest, by names relative to the checkpoint's folder, with `/`.
      facts: JSON for people and for `retention.py`: "logs" with metrics,
        "epoch", "started", "num_processes". Numbers that JSON has not are
        strings: "NaN", "Infinity", "-Infinity".
    """

    version: int = VERSION
    step: int
    created: float
    files: Mapping[str, tuple[int, str]]
    facts: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(size for size, _ in self.files.values())


def _is_step(value: object) -> bool:
    return type(value) is int and step_of(str(value)) is not None


_FORM = {
    "version": int,
    "step": _is_step,
    "created": lambda value: type(value) is float,
    "files": dict,
    "facts": dict,
    "checksum": object,
}


def write_manifest(
    path: str | os.PathLike[str],
    step: int,
    facts: Mapping[str, Any],
    *,
    created: float | None = None,
) -> Manifest:
    """Makes a checkpoint complete: hashes its files and writes its manifest.

    On return everything is on the disk, and the checkpoint is good. To be
    called by one process, when all have written their files. Reads every file
    once (1 GB in about a second).

    Args:
      path: The checkpoint's folder, named by its step.
      step: Train steps done.
      facts: Short JSON: see `Manifest.facts`. Numpy's numbers are taken too.
      created: When, in seconds since 1970 (UTC); None for now.

    Raises:
      DamagedCheckpoint: the folder is missing, or holds something that no
        checkpoint holds: a link, a pipe.
      TypeError: a fact is no JSON.
      ValueError: the folder is not named by the step; too many facts.
      OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    if path.name != step_path(path.parent, step).name:
        raise ValueError(
            "A checkpoint's folder is named by its step. Received: "
            f"step={step}, path={str(path)!r}. Give the folder of that step."
        )
    sizes = find_files(path)
    manifest = Manifest(
        step=int(step),
        created=time.time() if created is None else float(created),
        files={
            name: (size, digest(path, name))
            for name, size in sorted(sizes.items())
        },
        facts={name: _plain(value, name) for name, value in facts.items()},
    )
    text = _serialize(manifest)
    try:
        load_json(text, max_characters=MAX_BYTES)
    except ValueError as error:
        raise ValueError(
            "A manifest is short JSON that is read again. Received: one of "
            f"{len(sizes)} files, of which {error}. Leave that out of `facts`."
        ) from None
    names = {path / name for name in sizes}
    for flushed in sorted(names | {name.parent for name in names}):
        flush(flushed)
    _write(path, text)
    return manifest


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Reads a checkpoint's manifest; its files are not looked at.

    Args:
      path: The checkpoint's folder.

    Raises:
      DamagedCheckpoint: the manifest is missing (the save did not end), of
        another step or version, or changed since it was written.
    """
    path = pathlib.Path(path)
    check_folder(path)
    if not os.path.lexists(path / MANIFEST):
        check_folder(path)  # It may have been deleted just now.
        fault = "it is missing: the save did not end"
        raise damaged(path, MANIFEST, fault, _PARTIAL)
    with open_file(path, MANIFEST) as file:
        text = file.read(MAX_BYTES + 1) or b""
    manifest = _parse(path, text)
    if manifest.step != step_of(path.name):
        fault = f"it is that of step {manifest.step}"
        raise damaged(path, MANIFEST, fault)
    return manifest


def _serialize(manifest: Manifest) -> bytes:
    """The one way in which a manifest is written."""
    content: dict[str, Any] = {
        "version": manifest.version,
        "step": manifest.step,
        "created": manifest.created,
        "files": {name: list(entry) for name, entry in manifest.files.items()},
        "facts": manifest.facts,
    }
    content["checksum"] = hashlib.sha256(_dump(content)).hexdigest()
    return _dump(content) + b"\n"


def _dump(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, allow_nan=False, indent=1)
    return text.encode("ascii")


def _write(path: pathlib.Path, text: bytes) -> None:
    """Writes the manifest in one go: it is there whole, or not at all."""
    # Dropped if the process is killed: the folder is a partial save then.
    temporary = path / f"{MANIFEST}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path / MANIFEST)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush(path)
    flush(path.parent)


def _parse(path: pathlib.Path, text: bytes) -> Manifest:
    if not text:
        raise damaged(path, MANIFEST, "it is empty")
    try:
        content = load_json(text, max_characters=MAX_BYTES)
    except ValueError as error:
        fault = f"it is no JSON as we write it: {error}"
        raise damaged(path, MANIFEST, fault) from None
    if not isinstance(content, dict) or "version" not in content:
        raise damaged(path, MANIFEST, "it has no version")
    if content["version"] != VERSION or isinstance(content["version"], bool):
        fault = f"its version is not {VERSION}"
        raise damaged(path, MANIFEST, fault, _NEWER)
    fault = _fault_of(content)
    if fault:
        raise damaged(path, MANIFEST, fault)
    manifest = Manifest(
        step=content["step"],
        created=content["created"],
        files={
            name: (size, checksum)
            for name, (size, checksum) in content["files"].items()
        },
        facts=content["facts"],
    )
    if _serialize(manifest) != text:
        fault = "its checksum differs: it was changed after it was written"
        raise damaged(path, MANIFEST, fault)
    return manifest


def _fault_of(content: dict[str, Any]) -> str | None:
    """What is wrong with the types in a manifest."""
    if set(content) != set(_FORM):
        return "it has other keys than a manifest"
    fault = fault_of(content, _FORM)
    if fault is not None:
        return fault
    for name, entry in content["files"].items():
        if fault_of(entry, (is_count, _is_sha256)) is not None:
            return f"what it says of {shown(name)} is no size and checksum"
    return None


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _plain(value: Tree, name: str) -> Tree:
    """A fact as JSON has it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part, name) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, name) for part in value]
    if hasattr(value, "tolist"):  # Numpy's and jax's numbers and arrays.
        return _plain(value.tolist(), name)
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
        "Facts of a checkpoint are JSON: numbers, strings, lists, mappings. "
        f"Received: an object of type {type(value).__name__} in {name!r}. "
        "Turn it into a number or a string."
    )
