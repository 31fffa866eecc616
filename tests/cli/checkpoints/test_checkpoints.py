"""What `keras-strategies checkpoints` shows of a directory."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from keras_strategies.checkpoint.directory.lock import DirectoryLock
from keras_strategies.checkpoint.directory.manifest import write_manifest
from keras_strategies.checkpoint.directory.retention import delete
from keras_strategies.cli import main
from keras_strategies.cli.checkpoints import checkpoint_list
from keras_strategies.cli.checkpoints.checkpoint_list import look_at
from keras_strategies.cli.checkpoints.checkpoints import print_listing
from tests.support.checkpoint.damages import MANIFEST, flip
from tests.support.checkpoint.written import VARIABLES, write_small

pytestmark = pytest.mark.quick

LOGS = {
    "loss": 0.25,
    "accuracy": 0.5,
    "val_loss": float("nan"),
    "val_accuracy": 1,
}


def write(directory, step, facts=None, variables=VARIABLES, seconds=0.0):
    facts = {"logs": LOGS, "epoch": step // 4} if facts is None else facts
    created = 1.7e9 + seconds
    return write_small(directory, step, facts, variables, created=created)


@pytest.fixture
def directory(tmp_path):
    """Steps 3 and 12, good; 20, whose save did not end; and what is left."""
    directory = tmp_path / "run"
    write(directory, 3)
    write(directory, 12, seconds=7140)
    (write(directory, 20) / MANIFEST).unlink()
    for name in ("24.orbax-checkpoint-tmp", "1.deleting-ab", "2.damaged-1"):
        (directory / name).mkdir()
        (directory / name / "file").write_bytes(b"x" * 1000)
    return directory


def problems_of(directory):
    entries = look_at(str(directory)).checkpoints
    return {entry.step: entry.problem for entry in entries if entry.problem}


def text_of(listing, width):
    console = Console(width=width, file=io.StringIO())
    # Paths of tests are of any length.
    listing = dataclasses.replace(listing, directory="/run")
    print_listing(listing, console)
    return [line.rstrip() for line in console.file.getvalue().split("\n")]


def test_table_tells_all(directory):
    lines = text_of(look_at(str(directory)), 120)
    logs = "accuracy=0.5, loss=0.25, val_accuracy=1, val_loss=NaN"
    heads = "step size saved (UTC) state epochs metrics"
    assert [" ".join(line.split()) for line in lines] == [
        "/run",
        heads,
        f"3 1.7 kB 2023-11-14 22:13 verified 0 {logs}",
        f"12 1.7 kB 2023-11-15 00:12 verified 3 {logs}",
        "20 1.2 kB damaged",
        "Left behind: 1.deleting-ab, 1.0 kB: interrupted deletion.",
        "Left behind: 24.orbax-checkpoint-tmp, 1.0 kB: interrupted save.",
        "Left behind: 2.damaged-1, 1.0 kB: damaged, renamed by a run.",
        "Step 20 is damaged: manifest.json: it is missing: the save did not "
        "finish.",
        "3 checkpoints, 1 damaged, 7.5 kB.",
        "",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminal_folds(directory, width):
    lines = text_of(look_at(str(directory)), width)
    assert max(map(len, lines)) <= width
    letters = "".join("".join(lines).split())
    wide = text_of(look_at(str(directory)), 200)
    # Cells are folded beside each other, and nothing of them is cut off.
    assert sorted(letters) == sorted("".join("".join(wide).split()))


@pytest.mark.parametrize(
    ("changed", "quick", "status"),
    [(None, False, 0), ("flip", False, 1), ("flip", True, 0), ("cut", True, 1)],
)
def test_exit_status_tells_of_damage(directory, changed, quick, status, capsys):
    delete(directory, 20)
    file = directory / "3" / "run" / "metadata"
    if changed == "flip":
        flip(file)
    elif changed == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    words = ["checkpoints", str(directory), *(["--quick"] * quick)]
    assert main(words) == status
    shown = capsys.readouterr().out
    assert ("sizes match" if quick else "verified") in shown
    assert ("Step 3 is damaged: run/metadata: " in shown) == bool(status)


def test_json_says_the_same(directory, capsys):
    assert main(["checkpoints", "--json", str(directory)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["directory"] == str(directory)
    assert said["num_damaged"] == 1
    assert said["writer"] is None
    first, _, last = said["checkpoints"]
    assert first["state"] == "verified"
    assert first["created"] == "2023-11-14T22:13:20+00:00"
    assert first["facts"]["logs"]["val_loss"] == "NaN"
    assert last["state"] == "damaged"
    assert last["problem"].startswith("manifest.json: it is missing")
    assert [left["name"] for left in said["left_behind"]] == [
        "1.deleting-ab",
        "24.orbax-checkpoint-tmp",
        "2.damaged-1",
    ]
    sizes = [part["num_bytes"] for part in said["checkpoints"]]
    assert said["num_bytes"] == sum(sizes) + 3000


@pytest.mark.parametrize("option", ["--json", "--quick"])
def test_who_reads_may_stop(directory, option):
    command = [sys.executable, "-m", "keras_strategies.cli", "checkpoints"]
    reader, writer = os.pipe()
    # Nobody reads: writing fails, as after `| head -1`.
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [*command, option, str(directory)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_newest_without_a_manifest_is_being_saved_if_somebody_writes(directory):
    with DirectoryLock(directory):
        listing = look_at(str(directory))
    assert listing.checkpoints[-1].state == "being saved"
    assert not listing.num_damaged
    lines = text_of(listing, 80)
    assert any("being saved" in line for line in lines)
    assert any(
        line.startswith("A run is writing here: process") for line in lines
    )
    assert any(line.endswith("interrupted or running save.") for line in lines)
    # Older ones are no saves under way.
    write(directory, 30)
    with DirectoryLock(directory):
        assert list(problems_of(directory)) == [20]


def test_checkpoint_deleted_meanwhile_is_left_out(directory, monkeypatch):
    original = checkpoint_list.verify

    def verify(path, *, is_quick):
        if path.name == "12":
            shutil.rmtree(path)
        return original(path, is_quick=is_quick)

    monkeypatch.setattr(checkpoint_list, "verify", verify)
    listing = look_at(str(directory))
    assert [entry.step for entry in listing.checkpoints] == [3, 20]


def test_empty_directory_says_so(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "No checkpoints." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none", "cannot be listed: No such file or directory"),
        ("run/3/run/metadata", "cannot be listed: Not a directory"),
        (
            "run/3",
            "is a single checkpoint. Pass the directory that contains it.",
        ),
    ],
)
def test_wrong_directory_is_reported(directory, path, expected, capsys):
    assert main(["checkpoints", str(directory.parent / path)]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--nonsense", "a"]])
def test_wrong_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", *words])
    assert caught.value.code == 2
    assert "usage: keras-strategies" in capsys.readouterr().err


def test_texts_of_a_checkpoint_do_no_harm_to_a_terminal(tmp_path):
    evil = "\x1b[31m[bold]\n\u202e"
    logs = {evil: evil, "list": [1], "none": None}
    write(
        tmp_path,
        1,
        facts={"logs": logs, "epoch": evil},
        variables={evil: {"a": [[2, 3], "f"]}},
    )
    for width in (60, 200):
        lines = text_of(look_at(str(tmp_path)), width)
        assert all(line.isprintable() for line in lines)
    assert r"\x1b[31m[bold]\n\u202e" in "".join(lines)


@pytest.mark.parametrize("created", [1e300, -1e300, 0.0])
def test_odd_times_are_shown(tmp_path, created):
    path = write(tmp_path, 1)
    write_manifest(path, 1, {}, created=created)
    listing = look_at(str(tmp_path))
    assert listing.checkpoints[0].state == "verified"
    assert text_of(listing, 80)
