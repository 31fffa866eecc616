"""What can happen to a checkpoint on disk, as a table.

Each of `DAMAGES` is called with a checkpoint's directory, one of several in a
directory, and damages it so that it must not be restored.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable

MANIFEST = "manifest.json"
# One file of each kind that a checkpoint holds which one process wrote.
KINDS = {
    "_CHECKPOINT_METADATA": "_CHECKPOINT_METADATA",
    "commit_success.txt": "commit_success.txt",
    "run/metadata": "run/metadata",
    "state/_METADATA": "state/_METADATA",
    "state/_sharding": "state/_sharding",
    "array_metadatas": "state/array_metadatas/process_0",
    "state/manifest.ocdbt": "state/manifest.ocdbt",
    "state/d": "state/d/*",
    "process's manifest.ocdbt": "state/ocdbt.process_0/manifest.ocdbt",
    "process's d": "state/ocdbt.process_0/d/*",
    "manifest.json": MANIFEST,
}
OF_DEVICES = ("state/_sharding", "array_metadatas")
ARRAYS = KINDS["process's d"]


@dataclasses.dataclass(frozen=True)
class Damage:
    """One of them.

    Attributes:
      name: What it is.
      do: Does it to a checkpoint's directory.
      names: What an error's text must name: a part of it.
      is_quick: Whether names and sizes alone show it.
      is_of_devices: Whether it is of a file that is there for arrays on
        devices alone: those of a job of several processes, and parts.
    """

    name: str
    do: Callable[[pathlib.Path], object]
    names: str
    is_quick: bool = True
    is_of_devices: bool = False

    def __call__(self, path: pathlib.Path) -> None:
        self.do(path)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def find(path: pathlib.Path, pattern: str) -> pathlib.Path:
    """The first of a checkpoint's files that match, by name."""
    return sorted(path.glob(pattern))[0]


def flip(file: pathlib.Path, position: int | None = None) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    file.write_bytes(content)


def forge(path: pathlib.Path, change: Callable[[dict], None]) -> None:
    """Changes a manifest, and its checksum to match."""
    content = json.loads((path / MANIFEST).read_bytes())
    del content["checksum"]
    change(content)
    content["checksum"] = hashlib.sha256(_dump(content)).hexdigest()
    (path / MANIFEST).write_bytes(_dump(content) + b"\n")


def _dump(content: dict) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def _truncate(path):
    file = find(path, ARRAYS)
    os.truncate(file, file.stat().st_size - 1)


def _append(path):
    with open(find(path, ARRAYS), "ab") as file:
        file.write(b"\0")


def _copy_manifest_of_another_step(path):
    others = sorted(path.parent.glob(f"[0-9]*/{MANIFEST}"))
    other = next(other for other in others if other.parent != path)
    shutil.copy(other, path / MANIFEST)


def _make_manifest_huge(path):
    with open(path / MANIFEST, "ab") as file:
        file.truncate(1 << 30)


def _link_file(path):
    # To the very same bytes, elsewhere.
    _replace_by_link(find(path, ARRAYS))


def _link_directory(path):
    _replace_by_link(path / "state" / "ocdbt.process_0")


def _replace_by_link(path):
    moved = _outside(path)
    shutil.move(path, moved)
    path.symlink_to(moved)


def _outside(path):
    """A path beside the directory of checkpoints that is not there yet."""
    step = next(part for part in path.parents if (part / MANIFEST).exists())
    return step.parent.parent / f"outside-{step.name}-{path.name}"


def _link_step(path):
    moved = path.parent.parent / f"outside-{path.name}"
    shutil.move(path, moved)
    path.symlink_to(moved)


def _replace_step_by_file(path):
    shutil.rmtree(path)
    path.write_bytes(b"")


def _replace_file_by_directory(path):
    file = find(path, ARRAYS)
    file.unlink()
    file.mkdir()


def _replace_directory_by_file(path):
    shutil.rmtree(path / "state" / "d")
    (path / "state" / "d").write_bytes(b"")


def _replace_by_pipe(path):
    file = find(path, ARRAYS)
    file.unlink()
    os.mkfifo(file)


def _add_directory(path):
    (path / "assets").mkdir()
    (path / "assets" / "words.txt").write_bytes(b"")


def _drop_pickle(path):
    (path / "state" / "optimizer.pkl").write_bytes(pickle.dumps({}))


def _forge_name(name):
    def change(path):
        entry = [3, hashlib.sha256(b"abc").hexdigest()]
        forge(path, lambda content: content["files"].update({name: entry}))

    return change


def _forge_entry(name, value):
    def change(path):
        forge(path, lambda content: content.update({name: value}))

    return change


def _forge_deep_facts(path):
    """Facts that JSON can read, but not write."""
    text = (path / MANIFEST).read_text()
    start, end = text.index(' "facts": {'), text.index(' "files": {')
    deep = f' "facts": {{"a": {"[" * 900}{"]" * 900}}},\n'
    (path / MANIFEST).write_text(text[:start] + deep + text[end:])


def _swap(path):
    first, second = path / "state/_METADATA", path / "_CHECKPOINT_METADATA"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def _swap_case(path):
    file = path / "state/_METADATA"
    file.write_bytes(file.read_bytes().swapcase())


def _write(name, content=b"abc"):
    return lambda path: (path / name).write_bytes(content)


def _rename(old, new):
    return lambda path: (path / old).rename(path / new)


def _flips():
    for kind, pattern in KINDS.items():
        yield Damage(
            f"flipped byte in {kind}",
            lambda path, pattern=pattern: flip(find(path, pattern)),
            pattern.rstrip("*"),
            is_quick=kind == MANIFEST,
            is_of_devices=kind in OF_DEVICES,
        )


DAMAGES = (
    *_flips(),
    # Files of another content.
    Damage("truncated arrays", _truncate, "state/ocdbt.process_0/d/"),
    Damage("appended byte", _append, "state/ocdbt.process_0/d/"),
    Damage("emptied file", _write("run/metadata", b""), "run/metadata"),
    Damage("two files swapped", _swap, "_METADATA"),
    Damage(
        "other content of its size",
        _swap_case,
        "state/_METADATA",
        is_quick=False,
    ),
    # Files that are not there.
    Damage(
        "missing arrays",
        lambda path: find(path, ARRAYS).unlink(),
        "state/ocdbt.process_0/d/",
    ),
    Damage(
        "missing run",
        lambda path: shutil.rmtree(path / "run"),
        "run/commit_success.txt",
    ),
    Damage(
        "empty directory",
        lambda path: [shutil.rmtree(path), path.mkdir()],
        MANIFEST,
    ),
    # Files that should not be there.
    Damage("pickle", _drop_pickle, "state/optimizer.pkl"),
    Damage("npy", _write("state/d/kernel.npy"), "state/d/kernel.npy"),
    Damage("foreign file", _write("notes.txt"), "notes.txt"),
    Damage("file like arrays", _write(f"state/d/{'0' * 32}"), "0" * 32),
    Damage("foreign directory", _add_directory, "assets/words.txt"),
    Damage("newline in a name", _write("a\nb"), r"a\nb"),
    Damage("name that is no text", _write("a\udcff"), r"a\udcff"),
    Damage("right-to-left name", _write("a\u202egpj"), r"a\u202egpj"),
    Damage("temporary file", _write("manifest.json.ab.tmp"), "json.ab.tmp"),
    # Names.
    Damage("other case", _rename("run/metadata", "run/METADATA"), "METADATA"),
    Damage("renamed directory", _rename("run", "run2"), "run/"),
    # Links and what is no file.
    Damage("linked file", _link_file, "state/ocdbt.process_0/d/"),
    Damage("linked directory", _link_directory, "state/ocdbt.process_0"),
    Damage("linked step", _link_step, "symbolic link"),
    Damage(
        "linked manifest",
        lambda path: _replace_by_link(path / MANIFEST),
        MANIFEST,
    ),
    Damage("pipe", _replace_by_pipe, "state/ocdbt.process_0/d/"),
    Damage("step that is a file", _replace_step_by_file, "not a directory"),
    Damage(
        "directory in place of a file",
        _replace_file_by_directory,
        "state/ocdbt.process_0/d/",
    ),
    Damage(
        "file in place of a directory", _replace_directory_by_file, "state/d"
    ),
    # Manifests.
    Damage(
        "missing manifest",
        lambda path: (path / MANIFEST).unlink(),
        f"{MANIFEST}: it is missing",
    ),
    Damage("empty manifest", _write(MANIFEST, b""), f"{MANIFEST}: it is not"),
    Damage("manifest that is no JSON", _write(MANIFEST, b"{"), MANIFEST),
    Damage("manifest of NaN", _write(MANIFEST, b'{"version": NaN}'), MANIFEST),
    Damage(
        "manifest nested deeply", _write(MANIFEST, b"[" * 100_000), MANIFEST
    ),
    Damage(
        "manifest with a key twice",
        _write(MANIFEST, b'{"version": 1, "version": 1}'),
        MANIFEST,
    ),
    Damage(
        "manifest of another step",
        _copy_manifest_of_another_step,
        f"{MANIFEST}: it is the manifest of step",
    ),
    Damage(
        "huge manifest",
        _make_manifest_huge,
        f"{MANIFEST}: it is not a valid manifest: it has",
    ),
    Damage(
        "manifest of another version",
        _forge_entry("version", 2),
        f"{MANIFEST}: its version is not 1",
    ),
    Damage("manifest without time", _forge_entry("created", 0), MANIFEST),
    Damage("manifest of no files", _forge_entry("files", {}), "CHECKPOINT"),
    Damage("manifest of deep facts", _forge_deep_facts, MANIFEST),
    Damage("manifest with another key", _forge_entry("more", 1), MANIFEST),
    Damage(
        "manifest with a path out",
        _forge_name("state/d/../../../x"),
        "state/d/../../../x",
    ),
    Damage("manifest with a root path", _forge_name("/etc/x"), "/etc/x"),
    Damage(
        "manifest that lists a pickle",
        _forge_name("state/optimizer.pkl"),
        "optimizer.pkl",
    ),
)
