"""What a good checkpoint is, and that nothing else passes for one."""

import errno
import json
import math
import os
import pathlib
import shutil
import socket
import stat
import sys
import tempfile

import numpy as np
import pytest

from keras_strategies.checkpoint.directory import files, names, retention
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.manifest import (
    Manifest,
    read_manifest,
    write_manifest,
)
from keras_strategies.checkpoint.directory.verify import (
    find_newest_good,
    guard_read,
    verify,
)
from tests.support.checkpoint.damages import DAMAGES, MANIFEST, find, flip
from tests.support.checkpoint.written import write_checkpoints, write_files
from tests.support.commands import python

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[3]
NOBODY = 65534


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine") / "checkpoints"
    write_checkpoints(directory)
    return directory


@pytest.fixture
def directory(pristine, tmp_path):
    """A copy of the checkpoints of steps 3 and 12; 12 may be written to."""
    copy = tmp_path / "checkpoints"
    shutil.copytree(pristine / "3", copy / "3", copy_function=os.link)
    shutil.copytree(pristine / "12", copy / "12")
    return copy


# Names.


@pytest.mark.parametrize("step", [0, 7, 120, 2**63 - 1])
def test_step_of_a_name(step):
    assert names.parse_step(str(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        *(str(2**63), "9" * 5000, "007", "00", "-1", "+1", "1.5", "1e3"),
        *("1_000", " 1", "1\n", "", ".", "..", "1/2", "\u0663", "\u00b2"),
        *("\uff11", "3.orbax-checkpoint-tmp", "3.deleting-ab"),
    ],
)
def test_names_that_are_no_steps(name):
    assert names.parse_step(name) is None


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (-1, ValueError),
        (2**63, ValueError),
        (True, TypeError),
        (1.0, TypeError),
        ("../x", TypeError),
        (None, TypeError),
    ],
)
def test_step_path_refuses_what_is_no_step(step, error):
    with pytest.raises(error, match=r"A checkpoint's step .* Received"):
        names.step_path("/tmp", step)


def test_step_path_takes_numpy_integers():
    assert names.step_path("a", np.int64(7)) == pathlib.Path("a/7")


def test_steps_are_in_order(tmp_path):
    for name in ("10", "9", "007", "11.orbax-checkpoint-tmp", "x"):
        (tmp_path / name).mkdir()
    # Verification refuses these two.
    (tmp_path / "12").write_bytes(b"")
    (tmp_path / "13").symlink_to(tmp_path / "9")
    assert names.find_steps(tmp_path) == [9, 10, 12, 13]
    assert names.find_steps(tmp_path / "none") == []
    with pytest.raises(NotADirectoryError, match="12"):
        names.find_steps(tmp_path / "12")


def test_partial_saves_are_what_killed_processes_leave(tmp_path):
    partial = (
        "1.deleting-0a",
        "2.orbax-checkpoint-tmp",
        "2.saving",
        "2.saving.orbax-checkpoint-tmp",
    )
    others = ("3", "x.orbax-checkpoint-tmp", ".lock", "03.deleting-0a")
    others += ("2.saving-notes", "02.saving")
    for name in (*partial, *others):
        (tmp_path / name).mkdir()
    assert [path.name for path in names.find_partial_saves(tmp_path)] == list(
        partial
    )
    assert names.find_partial_saves(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*", "what?"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="must not contain"):
        retention.check_name(tmp_path / name)
    retention.check_name(tmp_path / "lr=0.1 (b)]")


def test_a_checkpoint_is_no_directory_of_checkpoints(tmp_path):
    (tmp_path / "25").mkdir()
    (tmp_path / "25" / "manifest.json").touch()
    with pytest.raises(
        ValueError, match="is itself a checkpoint. Pass its parent"
    ):
        retention.check_name(tmp_path / "25")
    retention.check_name(tmp_path)
    (tmp_path / "26").mkdir()
    retention.check_name(tmp_path / "26")


def test_new_directory_is_for_its_owner_alone(tmp_path):
    path = names.make_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    names.make_directory(path)
    # Somebody chose that.
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert not list(path.iterdir())


# Manifests.


def test_manifest_lists_every_file_that_orbax_writes(directory):
    path = directory / "3"
    manifest = verify(path)
    found = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and file.name != MANIFEST
    }
    assert len(found) > 10
    assert {name: size for name, (size, _) in manifest.files.items()} == found
    assert manifest.num_bytes == sum(found.values())
    assert manifest.step == 3
    assert manifest.created == 1.7e9 + 3
    assert manifest.facts == {"logs": {"loss": 0.25}, "epoch": 0}
    assert verify(path, is_quick=True) == manifest == read_manifest(path)


def test_facts_are_turned_into_json(tmp_path):
    (tmp_path / "1").mkdir()
    facts = {
        "logs": {
            "loss": np.float32(0.5),
            "nan": math.nan,
            "inf": np.float64(np.inf),
            "low": -math.inf,
        },
        "epoch": np.int64(3),
        "shape": (2, np.array([1, 2])),
        "is": True,
        "none": None,
        "text": "\u00e4\n\udcff",
    }
    expected = {
        "logs": {
            "loss": 0.5,
            "nan": "NaN",
            "inf": "Infinity",
            "low": "-Infinity",
        },
        "epoch": 3,
        "shape": [2, [1, 2]],
        "is": True,
        "none": None,
        "text": "\u00e4\n\udcff",
    }
    manifest = write_manifest(tmp_path / "1", 1, facts)
    assert manifest.facts == expected
    assert read_manifest(tmp_path / "1") == manifest


@pytest.mark.parametrize(
    ("step", "facts", "error", "text"),
    [
        (1, {"a": object()}, TypeError, "an object of type object"),
        (1, {"a": {"b": b""}}, TypeError, "type bytes"),
        (1, {"a": "x" * (17 << 20)}, ValueError, "maximum of 16777216"),
        (1, {"a": json.loads("[" * 70 + "]" * 70)}, ValueError, "too deeply"),
    ],
)
def test_wrong_arguments_write_no_manifest(tmp_path, step, facts, error, text):
    (tmp_path / "1").mkdir()
    with pytest.raises(error, match=text):
        write_manifest(tmp_path / "1", step, facts)
    assert not list((tmp_path / "1").iterdir())


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "gone"])
def test_odd_directory_gets_no_manifest(tmp_path, kind, monkeypatch):
    path = tmp_path / "1"
    path.mkdir()
    name = "run"
    # The path of a socket is short.
    monkeypatch.chdir(path)
    if kind == "link":
        (path / name).symlink_to(tmp_path)
    elif kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    else:
        name = "the directory does not exist"
        path.rmdir()
    with pytest.raises(DamagedCheckpoint, match=name):
        write_manifest(path, 1, {})
    assert not (path / MANIFEST).exists()


def test_every_byte_of_a_manifest_counts(directory):
    path = directory / "12"
    content = (path / MANIFEST).read_bytes()
    # Of all kinds: digits, names, spaces and ends of lines.
    for position in {*range(0, len(content), 17), len(content) - 1}:
        flip(path / MANIFEST, position)
        with pytest.raises(DamagedCheckpoint, match=MANIFEST):
            read_manifest(path)
        (path / MANIFEST).write_bytes(content)
    verify(path)


def test_directories_may_be_nested_deeper_than_functions(tmp_path):
    directories = [tmp_path / "1"]
    for _ in range(sys.getrecursionlimit()):
        directories.append(directories[-1] / "a")
    try:
        for directory in directories:
            directory.mkdir()
        (directories[-1] / "file").write_bytes(b"abc")
        (name,) = write_manifest(directories[0], 1, {}).files
        assert name.count("/") == len(directories) - 1
        verify(directories[0])
        assert files.measure_size(directories[0]) >= 0
    finally:
        # pytest would delete them with a function that calls itself.
        (directories[-1] / "file").unlink()
        for directory in directories[:0:-1]:
            directory.rmdir()


def test_other_writing_of_the_same_json_is_refused(directory):
    file = directory / "12" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_bytes()), sort_keys=True))
    with pytest.raises(DamagedCheckpoint, match="after it was written"):
        read_manifest(directory / "12")


def test_time_of_a_save_that_is_no_float_is_damage(directory):
    for created in (10**400, 5, True, "5"):
        path = directory / "12" / MANIFEST
        content = json.loads(path.read_bytes()) | {"created": created}
        path.write_text(json.dumps(content))
        with pytest.raises(DamagedCheckpoint, match="wrong structure"):
            read_manifest(directory / "12")


# Damage.


def test_there_are_more_than_forty_damages():
    assert len({str(damage) for damage in DAMAGES}) == len(DAMAGES) > 40


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_checkpoint_is_refused_and_the_one_before_used(
    directory, damage
):
    path = directory / "12"
    damage(path)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(path)
    text = str(caught.value)
    assert text.startswith(f"The checkpoint {path} is damaged: ")
    assert damage.names in text
    assert damage.names in caught.value.problem
    assert text.isprintable()
    assert text.endswith(".")
    assert caught.value.path == path
    good, problems = find_newest_good(directory)
    assert good.step == 3
    assert [str(problem) for problem in problems] == [text]
    assert verify(directory / "3") == good
    if damage.is_quick:
        with pytest.raises(DamagedCheckpoint, match="is damaged"):
            verify(path, is_quick=True)
    else:
        verify(path, is_quick=True)


def test_newest_good_is_the_newest(directory):
    assert find_newest_good(directory)[0].step == 12
    assert find_newest_good(directory / "none") == (None, [])


def test_without_a_good_one_all_problems_are_reported(directory):
    (directory / "3" / MANIFEST).unlink()
    flip(find(directory / "12", "state/d/*"))
    good, problems = find_newest_good(directory)
    assert good is None
    assert [problem.path.name for problem in problems] == ["12", "3"]
    assert [problem.file for problem in problems][1] == MANIFEST


def test_pipe_that_takes_a_files_place_does_not_block(directory):
    path = directory / "12"
    (path / "run" / "metadata").unlink()
    os.mkfifo(path / "run" / "metadata")
    with pytest.raises(DamagedCheckpoint, match="it is not a file"):
        files.compute_digest(path, "run/metadata")


def test_link_that_takes_a_files_place_is_not_followed(directory):
    path = directory / "12"
    (path / "run" / "metadata").unlink()
    (path / "run" / "metadata").symlink_to("/etc/hostname")
    with pytest.raises(DamagedCheckpoint, match="symbolic link"):
        files.compute_digest(path, "run/metadata")


def test_deleted_while_it_is_read_is_said(directory):
    path = directory / "12"

    def read():
        with guard_read(path):
            shutil.rmtree(path)
            (path / "state" / "_METADATA").read_bytes()

    with pytest.raises(DamagedCheckpoint, match="was deleted while") as caught:
        read()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(DamagedCheckpoint, match="was deleted while"):
        files.compute_digest(path, "run/metadata")
    text = "12 is damaged: the directory does not exist"
    with pytest.raises(DamagedCheckpoint, match=text) as caught:
        verify(path)
    assert caught.value.problem == "the directory does not exist"


def test_other_errors_while_it_is_read_are_kept(directory):
    with pytest.raises(KeyError), guard_read(directory / "12"):
        raise KeyError("x")


def test_save_of_a_step_that_is_there_is_refused_by_orbax(directory):
    # Why a damaged checkpoint is deleted before its step is saved again.
    with pytest.raises(ValueError, match="already exists"):
        write_files(directory, 12)


# Space and rights.


def test_disk_that_is_too_small_is_reported_before_the_save(tmp_path):
    retention.check_free_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"needs 1000000000\.000 GB") as caught:
        retention.check_free_space(tmp_path, 10**18)
    assert caught.value.errno == errno.ENOSPC
    assert "free. Delete files" in str(caught.value)
    assert "GB are free" in str(caught.value)


def test_path_that_is_no_directory_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(OSError, match="must be a directory"):
            names.make_directory(path)


@pytest.mark.skipif(os.getuid() != 0, reason="root alone becomes somebody else")
@pytest.mark.parametrize("name", ["", "a"])
def test_directory_of_somebody_else_is_reported(name):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        _check_denied(os.path.join(directory, name), user=str(NOBODY))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["", "a"])
def test_directory_without_the_right_to_write_is_reported(tmp_path, name):
    tmp_path.chmod(0o500)
    _check_denied(os.path.join(tmp_path, name), user="")


def _check_denied(path, user):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from keras_strategies.checkpoint.directory import names\n"
        # Only now: somebody else may not be able to read Python.
        "if sys.argv[3]: os.setuid(int(sys.argv[3]))\n"
        "try: names.make_directory(sys.argv[1])\n"
        "except PermissionError as error: print(error)\n"
    )
    done = python("-c", code, path, ROOT, user, timeout=30)
    assert "that is writable" in done.stdout, done.stderr
    assert "Permission denied. Use another directory" in done.stdout
    assert path.rstrip("/") in done.stdout


def test_manifest_is_a_value():
    with pytest.raises(AttributeError):
        Manifest(step=1, created=0.0, files={}, facts={}).step = 2
