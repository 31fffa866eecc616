"""What Orbax does that `keras_strategies` relies on, or works around."""

import concurrent.futures.thread
import functools
import inspect
import json
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest


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
