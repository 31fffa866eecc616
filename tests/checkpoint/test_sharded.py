"""Checkpoints of divided variables.

The invariant: what is restored is what was saved, bit for bit, on whatever
number of shards, replicas and processes.
"""

import functools
import shutil
import signal

import pytest

import keras_strategies as ks
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.testing import assert_replicated, run_processes
from keras_strategies.variables.model_variables import all_variables
from tests.checkpoint import sharded
from tests.support.checkpoint.damages import DAMAGES
from tests.support.checkpoint.runs import Interrupted, assert_equal
from tests.support.combinations import combine, few

LAYOUTS = (
    *("sharded8", "sharded4", "sharded2", "sharded8_in_groups_of_2"),
    *("sharded_slots4", "mirrored8", "one"),
    *("sharded2_of_2_cores", "sharded4_of_2_cores_in_groups_of_2"),
)
QUICK = {
    ("sharded8", "sharded8"),
    ("sharded8", "sharded4"),
    ("sharded8", "mirrored8"),
    ("mirrored8", "sharded8_in_groups_of_2"),
    ("sharded_slots4", "one"),
    ("sharded2_of_2_cores", "sharded4"),
}
PAIRS = [
    pytest.param(
        first, then, marks=[] if (first, then) in QUICK else [pytest.mark.slow]
    )
    for first in LAYOUTS
    for then in LAYOUTS
]


def make_manager(model, directory):
    checkpoint = ks.checkpoint.Checkpoint(model=model)
    return ks.checkpoint.CheckpointManager(checkpoint, directory)


def built(name, plus=0.0):
    model = sharded.built(name)
    sharded.add(model, plus)
    return model


def placed(model):
    return [(v.path, v.value.sharding) for v in all_variables(model)]


@pytest.mark.parametrize(("first", "then"), few(PAIRS, every=2))
def test_any_layout_restores_what_another_saved(first, then, tmp_path):
    saved, found = built(first, 0.5), built(then)
    with make_manager(saved, tmp_path) as manager:
        manager.save(3)
    before = placed(found)
    with make_manager(found, tmp_path) as manager:
        assert manager.restore_or_initialize() == 3
    assert_equal(sharded.values_of(found), sharded.values_of(saved))
    assert [v for _, v in placed(found)] == [v for _, v in before]
    assert_replicated(found)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """What a layout's whole fit learns, and the checkpoints of one that was
    interrupted, by a function."""

    @functools.cache
    def begin(layout):
        directory = tmp_path_factory.mktemp(layout)
        whole = sharded.train(layout, directory / "whole")
        with pytest.raises(Interrupted):
            sharded.train(layout, directory / "kept", stop=7)
        return whole, directory / "kept"

    return begin


@pytest.mark.parametrize(("first", "then"), few(PAIRS, every=3))
def test_any_layout_resumes_what_another_began(first, then, begun, tmp_path):
    whole, kept = begun(first)
    shutil.copytree(kept, tmp_path / "kept")
    ours = sharded.train(then, tmp_path / "kept")
    assert_equal(ours, whole, is_exact=first == then)


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("count", "devices"), [(1, 8), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_killed_in_the_middle_of_a_save(tmp_path, count, devices):
    first, *_ = run_processes(
        "tests.checkpoint.sharded:killed_in_a_save",
        count,
        args=["sharded8" if count == 1 else "job", str(tmp_path), 3],
        devices_per_process=devices,
        must_succeed=False,
    )
    assert first.returncode == -signal.SIGKILL, first.output
    # Of step 3 something was written.
    assert any(path.name.startswith("3") for path in tmp_path.iterdir())
    assert find_steps(tmp_path) == [1, 2]
    model = built("sharded4")
    wanted = sharded.fill(built("one"), 2)
    with make_manager(model, tmp_path) as manager:
        assert manager.restore_or_initialize() == 2
    assert_equal(sharded.values_of(model), sharded.values_of(wanted))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Checkpoints of steps 1 and 2, of values 1 and 2."""
    directory = tmp_path_factory.mktemp("pristine")
    model = built("sharded8")
    with make_manager(model, directory) as manager:
        for step in (1, 2):
            sharded.fill(model, step)
            manager.save(step)
    return directory


@pytest.fixture(scope="module")
def four_replicas():
    return built("sharded4")


# tests/checkpoint/directory/test_format.py has all of them by default.
@pytest.mark.parametrize("damage", combine(DAMAGES, every=4), ids=str)
def test_a_damaged_checkpoint_is_refused(
    damage, pristine, four_replicas, tmp_path
):
    directory = tmp_path / "checkpoints"
    shutil.copytree(pristine, directory)
    damage(directory / "2")
    with make_manager(four_replicas, directory) as manager:
        assert manager.restore_or_initialize() == 1
        assert all((v == 1).all() for v in sharded.values_of(four_replicas))
        error = (ks.checkpoint.DamagedCheckpoint, FileNotFoundError)
        with pytest.raises(error, match="2 is damaged"):
            manager.restore(2)
    assert all((v == 1).all() for v in sharded.values_of(four_replicas))


@pytest.mark.slow
def test_a_shards_file_that_is_damaged_ends_all_processes(tmp_path):
    names = ["missing-0", "missing-1", "cut-0", "cut-1"]
    first, second = run_processes(
        "tests.checkpoint.sharded:refused",
        2,
        args=[str(tmp_path), names],
        devices_per_process=2,
    )
    assert first.value["writers"] == ["ocdbt.process_0", "ocdbt.process_1"]
    for told in (first.value, second.value):
        for name in names:
            error, is_untouched, step, is_restored = told[name]
            file = f"state/ocdbt.process_{name[-1]}/d/"
            for part in (f"{name}/2 is damaged", file, "Use an earlier step"):
                assert part in error, error
            assert is_untouched
            assert (step, is_restored) == (1, True)
