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

from keras_strategies.checkpoint.directory.format import write_manifest
from keras_strategies.checkpoint.directory.lock import DirectoryLock
from keras_strategies.checkpoint.directory.retention import delete
from keras_strategies.cli import main
from keras_strategies.cli.checkpoints import checkpoint_table
from keras_strategies.cli.checkpoints.checkpoint_list import (
    State,
    look_at,
)
from tests.checkpoint.damages import MANIFEST, flip
from tests.checkpoint.written import VARIABLES, write_small

pytestmark = pytest.mark.quick

NOW = 1.7e9 + 7200
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


def text_of(listing, width):
    console = Console(width=width, file=io.StringIO())
    # Paths of tests are of any length.
    listing = dataclasses.replace(listing, directory="/run")
    checkpoint_table.print_listing(listing, NOW, console)
    return [line.rstrip() for line in console.file.getvalue().split("\n")]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_fits_and_tells_all(directory, width):
    lines = text_of(look_at(str(directory)), width)
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    for text in (
        "3 1.7 kB 2 h + verified 0",
        "12 1.7 kB 1 min + verified 3",
        "20 1.2 kB x damaged",
        "model 2 arrays 72 values",
        "optimizer 1 array 1 value",
        "24.orbax-checkpoint-tmp",
        "1.deleting-ab",
        "2.damaged-1",
        "x Step 20 is damaged: manifest.json: it is missing: the save",
        "val_loss",
        "NaN",
        "3 checkpoints, 1 damaged, 7.5 kB.",
    ):
        assert text in shown, "\n".join(lines)


def test_narrow_terminal_folds(directory):
    lines = text_of(look_at(str(directory)), 40)
    assert max(map(len, lines)) <= 40
    assert lines[7].split() == ["3", "accuracy", "0.5,", "loss", "0.25,"]
    assert "x Step 20 is damaged: manifest.json: it" in lines


def test_metrics_are_columns_where_they_fit(directory):
    heads = ["accuracy", "loss", "val_accuracy", "val_loss"]
    wide = text_of(look_at(str(directory)), 120)
    assert wide[1].split() == ["step", "size", "age", "state", "epochs", *heads]
    assert wide[2].split()[-4:] == ["0.5", "0.25", "1", "NaN"]
    narrow = text_of(look_at(str(directory)), 60)
    assert narrow[1].split() == ["step", "size", "age", "state", "epochs"]
    assert narrow[6].split() == ["step", *heads]
    assert narrow[7].split() == ["3", "0.5", "0.25", "1", "NaN"]
    # Nothing of the one that does not say.
    assert narrow[9] == ""


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
    assert first["contents"]["model"] == {"num_arrays": 2, "num_values": 72}
    assert last["state"] == "damaged"
    assert last["fault"].startswith("manifest.json: it is missing")
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
    assert listing.entries[-1].state is State.UNDER_WAY
    assert not listing.damaged
    lines = text_of(listing, 80)
    assert any("- being saved" in line for line in lines)
    assert any(line.startswith("- Written to by process") for line in lines)
    assert any(line.endswith("save, stopped, or under way") for line in lines)
    # Older ones are no saves under way.
    write(directory, 30)
    with DirectoryLock(directory):
        assert [e.step for e in look_at(str(directory)).damaged] == [20]


def test_checkpoint_deleted_meanwhile_is_left_out(directory):
    def say(step):
        if step == 12:
            shutil.rmtree(directory / "12")

    listing = look_at(str(directory), report=say)
    assert [entry.step for entry in listing.entries] == [3, 20]


def test_link_is_shown_as_damaged(directory, tmp_path):
    shutil.move(directory / "12", tmp_path / "elsewhere")
    (directory / "12").symlink_to(tmp_path / "elsewhere")
    faults = {e.step: e.fault for e in look_at(str(directory)).damaged}
    assert faults[12] == "it is a symbolic link, not a folder"


def test_empty_directory_says_so(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "No checkpoints." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none", "cannot be listed: No such file or directory"),
        ("run/3/run/metadata", "cannot be listed: Not a directory"),
        ("run/3", "is one checkpoint. Give the directory that it is in: "),
    ],
)
def test_wrong_directory_is_told(directory, path, expected, capsys):
    assert main(["checkpoints", str(directory.parent / path)]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "words", [[], ["a", "b"], ["--verify", "--quick", "a"], ["--nonsense", "a"]]
)
def test_wrong_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", *words])
    assert caught.value.code == 2
    assert "usage: keras-strategies" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"variables": []}',
        b'{"variables": {"model": 3}}',
        b'{"variables": {"model": {"a": 3}}}',
        b'{"variables": {"model": {"a": [["x"], "f"]}}}',
        b'{"state": {}}',
        b"[" * 100_000,
    ],
)
def test_checkpoint_that_does_not_say_what_it_holds_is_good(
    tmp_path, variables
):
    write(tmp_path, 1, facts={}, variables=variables)
    (entry,) = look_at(str(tmp_path)).entries
    assert entry.state is State.VERIFIED
    assert entry.contents == {}
    lines = text_of(look_at(str(tmp_path)), 80)
    assert not any("hold" in line for line in lines)


def test_texts_of_a_checkpoint_do_no_harm_to_a_terminal(tmp_path):
    evil = "\x1b[31m[bold]\n\u202e"
    logs = {evil: evil, "list": [1], "none": None}
    write(
        tmp_path,
        1,
        facts={"logs": logs, "epoch": evil},
        variables={evil: {"a": [[2, 3], "f"]}},
    )
    for width in (60, 120):
        lines = text_of(look_at(str(tmp_path)), width)
        assert all(line.isprintable() for line in lines)
        assert r"\x1b[31m[bold]\n\u202e" in "".join(lines)


def test_different_contents_are_told_apart(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    write(tmp_path, 6, variables={"model": {"a": [[], "float32"]}})
    lines = text_of(look_at(str(tmp_path)), 80)
    assert "  Steps 1, 2, ..., 5 hold" in lines
    assert "  Step 6 holds" in lines
    assert "    model  1 array  1 value" in lines


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.0 MB"),
        (1_234_567_890, "1.2 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes(num_bytes, expected):
    assert checkpoint_table.size_text(num_bytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-3600, "in the future"),
        (-1, "0 s"),
        (0.5, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3600 * 23.9, "23 h"),
        (86400, "1 day"),
        (86400 * 364, "364 days"),
        (86400 * 800, "2 years"),
    ],
)
def test_ages(seconds, expected):
    assert checkpoint_table.age_text(seconds) == expected


@pytest.mark.parametrize("created", [1e300, -1e300, 0.0])
def test_odd_times_are_shown(tmp_path, created):
    path = write(tmp_path, 1)
    write_manifest(path, 1, {}, created=created)
    listing = look_at(str(tmp_path))
    assert listing.as_dict()["checkpoints"][0]["state"] == "verified"
    assert text_of(listing, 80)
