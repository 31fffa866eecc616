"""What Orbax does that `keras_strategies` relies on, or works around."""

import concurrent.futures.thread
import functools
import inspect
import json
import threading

import jax
import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest

import keras_strategies as ks
from keras_strategies.checkpoint import orbax_io
from tests.support.plain_keras import mirrored


@pytest.mark.parametrize(("name", "is_lost"), [("a[b]", True), ("ab", False)])
def test_a_path_with_a_pattern_is_saved_without_arrays(tmp_path, name, is_lost):
    # When this fails, `space.check_name` is not needed any more.
    path = tmp_path / name / "1"
    path.parent.mkdir()
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave({"a": np.ones(3)}))
    assert (path / "manifest.ocdbt").exists() is not is_lost


def test_the_tree_names_the_arrays_and_what_it_lacks_is_left_out(tmp_path):
    """What checkpoint/directory/verify.py reads, and why."""
    path = tmp_path / "1"
    handler = ocp.PyTreeCheckpointHandler()
    saved = {"a": {"x/y": np.ones(3)}, "b": {"z": np.ones(2)}}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(saved))
        content = json.loads((path / "_METADATA").read_text())
        tree = content["tree_metadata"]
        keys = [
            [key["key"] for key in entry["key_metadata"]]
            for entry in tree.values()
        ]
        assert sorted(keys) == [["a", "x/y"], ["b", "z"]]
        del tree["('b', 'z')"]
        (path / "_METADATA").write_text(json.dumps(content))
        placeholder = np.full(2, 7.0)
        item = saved | {"b": {"z": placeholder}}
        options = ocp.RestoreArgs(restore_type=np.ndarray)
        restored = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=item,
                restore_args=jax.tree.map(lambda _: options, item),
                partial_restore=True,
            ),
        )
    assert restored["b"]["z"] is placeholder


@pytest.mark.filterwarnings("ignore:Use .(save|load). instead")
def test_version_1_has_the_same_format(tmp_path):
    """As decision 50 says: it reads a checkpoint of ours, and the reverse."""
    from orbax.checkpoint.experimental import v1

    with (strategy := mirrored(2)).scope():
        variable = keras.Variable([1.0, 2.5])
    path = ks.checkpoint.Checkpoint(value=variable).save(tmp_path / "ours")
    (found,) = jax.tree.leaves(v1.load_pytree(path))
    np.testing.assert_array_equal(found, [1, 2.5])
    v1.save_pytree(tmp_path / "theirs", {"value": {"0": variable.value}})
    checkpointer = orbax_io.make_checkpointer((0,))
    value = jax.ShapeDtypeStruct((2,), "float32", sharding=strategy.mesh.whole)
    item = {"value": {"0": value}}
    restored = orbax_io.restore_arrays(
        checkpointer, tmp_path / "theirs", item, is_part=False
    )
    checkpointer.close()
    np.testing.assert_array_equal(restored["value"]["0"], [1, 2.5])


def test_pools_of_threads_end_by_what_threading_runs_first():
    """What `at_exit` goes before: of CPython, which tells nobody of it."""
    assert callable(threading._register_atexit)
    pools_end = concurrent.futures.thread._python_exit
    assert pools_end in map(_registered, threading._threading_atexits)


def _registered(each):
    """What was registered: itself, in a `partial`, or (3.13) in a lambda."""
    if isinstance(each, functools.partial):
        return each.func
    return inspect.getclosurevars(each).nonlocals.get("func", each)
