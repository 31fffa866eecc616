"""What Orbax does that `keras_strategies` relies on, or works around."""

import concurrent.futures.thread
import functools
import inspect
import threading

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
