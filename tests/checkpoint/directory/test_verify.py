"""Orbax's files of a checkpoint whose manifest is right, and they are not.

A checksum is no signature: who writes a checkpoint also writes its manifest.
"""

import gc
import json

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.checkpoint.directory import verify
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.manifest import write_manifest
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.checkpoint.reading import read_arrays
from keras_strategies.checkpoint.storage import Storage
from tests.fuzz.hostile import inputs
from tests.support.checkpoint import written
from tests.support.plain_keras import mirrored

TREE = "state/_METADATA"
ARRAYS = "state/array_metadatas/process_0"
ODD = [
    b"",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"null",
    b"[]",
    b'"text"',
    b"9" * 100_000,
    b"{}",
    b'{"tree_metadata": 3, "array_metadatas": 3}',
    b'{"tree_metadata": {"a": 3}, "array_metadatas": [3]}',
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    written.write_checkpoints(directory, steps=(3,))
    return directory


def restored_on_devices(directory, *, is_part=False):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    wanted = {
        group: {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
            for name, (shape, dtype) in entries.items()
        }
        for group, entries in written.VARIABLES.items()
    }
    storage = Storage(directory, processes=(0,), keep=Keep(last=None))
    try:
        return storage.restore(3, wanted, is_part=is_part)
    finally:
        storage.close()


READERS = {
    "all": restored_on_devices,
    "part": lambda directory: restored_on_devices(directory, is_part=True),
    "estimator": lambda directory: read_arrays(
        directory / "3", written.VARIABLES
    ),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_files_that_a_later_orbax_writes_are_no_damage(tmp_path, read):
    written.write_files(tmp_path, 3)
    path = tmp_path / "3"
    (path / "state" / "checksums").mkdir()
    (path / "state" / "checksums" / "process_0.json").write_text("{}")
    (path / "state" / "empty").mkdir()
    (path / "_ORBAX_VERSION").write_text("0.13")
    manifest = write_manifest(path, 3, {})
    assert {"_ORBAX_VERSION", "state/checksums/process_0.json"} < set(
        manifest.files
    )
    assert verify.find_newest_good(tmp_path) == (manifest, [])
    assert len(jax.tree.leaves(read(tmp_path))) == 3
    (path / "_ORBAX_VERSION").write_text("0.14")
    with pytest.raises(DamagedCheckpoint, match="_ORBAX_VERSION: its checksum"):
        verify.verify(path)


def try_to(read, directory):
    try:
        return jax.tree.leaves(read(directory)), None
    except DamagedCheckpoint as error:
        return None, str(error)


# Orbax's coroutines raise once more when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", [TREE, ARRAYS])
def test_a_hostile_file_is_named_or_the_numbers_are_right(
    directory, name, read
):
    path = directory / "3" / name
    text = path.read_bytes()
    right = jax.tree.leaves(read(directory))
    num_refused = 0
    try:
        for odd in [*ODD, *inputs([text.decode()], 60, 1, is_text=False)]:
            path.write_bytes(odd)
            found, problem = try_to(read, directory)
            if problem is None:
                for array, expected in zip(found, right, strict=True):
                    np.testing.assert_array_equal(array, expected)
                continue
            num_refused += 1
            assert "state" in problem
            assert len(problem) < 3000
    finally:
        path.write_bytes(text)
        gc.collect()
    assert num_refused >= 8


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_array_that_the_tree_lacks_is_missed(directory, read):
    path = directory / "3" / TREE
    text = path.read_text()
    content = json.loads(text)
    content["tree_metadata"].pop("('model', 'dense/kernel')")
    path.write_text(json.dumps(content))
    try:
        with pytest.raises(
            DamagedCheckpoint, match="arrays of model are missing"
        ):
            read(directory)
    finally:
        path.write_text(text)


def test_a_signed_checkpoint_with_a_hostile_file_is_refused(tmp_path):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoint = ks.checkpoint.Checkpoint(model=model)
    with ks.checkpoint.CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(1)
    (tmp_path / "1" / TREE).write_bytes(b"[" * 100_000)
    write_manifest(tmp_path / "1", 1, {})
    with (
        ks.checkpoint.CheckpointManager(checkpoint, tmp_path) as manager,
        pytest.raises(ks.checkpoint.DamagedCheckpoint, match="_METADATA"),
    ):
        manager.restore(1)
    with pytest.raises(ks.checkpoint.DamagedCheckpoint, match="_METADATA"):
        ks.checkpoint.load_weights(model, tmp_path)
