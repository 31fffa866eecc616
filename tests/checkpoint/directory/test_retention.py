"""Which checkpoints are kept, and how the others go."""

import dataclasses
import itertools
import math
import os
import random
import re
import shutil

import keras
import pytest

from keras_strategies.checkpoint.directory import names
from keras_strategies.checkpoint.directory.manifest import Manifest
from keras_strategies.checkpoint.directory.retention import (
    Keep,
    delete,
    delete_partial_saves,
    find_deletable,
)

pytestmark = pytest.mark.quick

HOUR = 3600.0


def made(step, hours=0.0, started=None, **logs):
    """A checkpoint's manifest."""
    facts = {"logs": logs}
    if started is not None:
        facts["started"] = started * HOUR
    return Manifest(step=step, created=hours * HOUR, files={}, facts=facts)


def losses(*values):
    return [made(step, loss=value) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("keep", "manifests", "expected"),
    [
        # The newest.
        (Keep(), losses(*[0] * 7), [0, 1]),
        (Keep(last=1), losses(0, 0, 0), [0, 1]),
        (Keep(last=3), losses(0, 0, 0), []),
        (Keep(last=4), losses(0, 0, 0), []),
        (Keep(last=0), losses(0, 0, 0), []),
        (Keep(last=None), losses(0, 0, 0), []),
        (Keep(last=1), [], []),
        (Keep(last=1), [made(9), made(10), made(8)], [8, 9]),
        # The best.
        (Keep(last=1, best="loss"), losses(3, 1, 2, 4), [0, 2]),
        (Keep(last=1, best="loss", mode="max"), losses(3, 1, 2, 0), [1, 2]),
        (Keep(last=1, best="loss", num_best=2), losses(3, 1, 2, 4), [0]),
        (Keep(last=1, best="loss", num_best=9), losses(3, 1, 2, 4), []),
        (Keep(last=2, best="loss"), losses(3, 4, 2, 1), [0, 1]),
        # Of equal ones the first.
        (Keep(last=1, best="loss"), losses(1, 1, 1, 2), [1, 2]),
        (Keep(last=1, best="loss", mode="max"), losses(1, 1, 0), [1]),
        # What is no number is never the best.
        (Keep(last=1, best="loss"), losses("NaN", 2, math.nan, 3), [0, 2]),
        (Keep(last=1, best="loss"), losses("-Infinity", True, 5, 6), [0, 1]),
        (Keep(last=1, best="loss"), losses(None, [1], "0", 6), [0, 1, 2]),
        (Keep(last=1, best="val_loss"), losses(1, 2, 3), [0, 1]),
        # One for every so many hours, beside the newest.
        (
            Keep(last=1, every_n_hours=1),
            [made(step, step / 2) for step in range(7)],
            [0, 1, 3, 5],
        ),
        (
            Keep(last=2, every_n_hours=2),
            [made(step, step) for step in range(6)],
            [0, 1, 3],
        ),
        (
            Keep(last=1, every_n_hours=0.5),
            [made(1, 0.0), made(2, 0.49), made(3, 0.5), made(4, 9)],
            [1, 2],
        ),
        # After a pause there is one, not one for each hour of it.
        (
            Keep(last=1, every_n_hours=1),
            [made(1, 0), made(2, 50), made(3, 50.1), made(4, 50.2)],
            [1, 3],
        ),
        # A run's hours begin with it, though its first ones are gone.
        (
            Keep(last=1, every_n_hours=10),
            [made(7, 11, started=0), made(8, 12, started=0)],
            [],
        ),
        (Keep(last=1, every_n_hours=10), [made(7, 11), made(8, 12)], [7]),
        # A clock that is set back.
        (
            Keep(last=1, every_n_hours=1),
            [made(1, 5), made(2, 3), made(3, 7), made(4, 0)],
            [1, 2],
        ),
        (
            Keep(last=1, every_n_hours=1, best="loss"),
            [
                made(1, 0, loss=1),
                made(2, 0.5, loss=0),
                made(3, 1, loss=1),
                made(4, 1.5, loss=1),
            ],
            [1],
        ),
    ],
)
def test_to_delete(keep, manifests, expected):
    assert find_deletable(manifests, keep) == expected
    assert find_deletable(reversed(manifests), keep) == expected


def test_logs_may_be_missing():
    odd = [
        dataclasses.replace(made(step), facts=facts)
        for step, facts in enumerate([{}, {"logs": 3}, {"logs": {"loss": 1}}])
    ]
    assert find_deletable(odd, Keep(last=1, best="loss")) == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_rules_hold_over_a_whole_run(seed):
    """Deleting after every save leaves what the rules say of all of them."""
    chance = random.Random(seed)
    keep = Keep(last=3, every_n_hours=2, best="loss", num_best=2)
    hours = itertools.accumulate(chance.random() for _ in range(60))
    saved, left = [], []
    for step, hour in enumerate(hours):
        manifest = made(step, hour, started=0, loss=chance.random())
        saved.append(manifest)
        left.append(manifest)
        gone = find_deletable(left, keep)
        left = [entry for entry in left if entry.step not in gone]
        assert left[-1] is manifest
        assert saved[-3:] == left[-3:]
        best = sorted(saved, key=lambda entry: entry.facts["logs"]["loss"])[:2]
        assert all(entry in left for entry in best)
    times = [entry.created / HOUR for entry in left]
    assert max(b - a for a, b in itertools.pairwise([0, *times])) < 2 + 1 + 1e-9
    assert len(left) < 3 + 2 + saved[-1].created / HOUR / 2 + 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"last": -1}, ValueError, "`last` must be >= 0"),
        ({"last": 2.0}, TypeError, "`last` must be an integer"),
        ({"last": True}, TypeError, "`last` must be an integer"),
        ({"num_best": 0}, ValueError, "`num_best` must be >= 1"),
        ({"num_best": None}, TypeError, "`num_best` must be an integer"),
        ({"every_n_hours": 0}, ValueError, "must be > 0"),
        ({"every_n_hours": -1}, ValueError, "must be > 0"),
        ({"every_n_hours": math.nan}, ValueError, "must be finite"),
        ({"every_n_hours": math.inf}, ValueError, "must be finite"),
        ({"every_n_hours": "1"}, TypeError, "must be a number"),
        ({"every_n_hours": True}, TypeError, "must be a number"),
        ({"best": 3}, TypeError, "`best` must be a metric's name"),
        ({"mode": "best"}, ValueError, '`mode` must be "auto", "min" or "max"'),
        ({"mode": None}, ValueError, '`mode` must be "auto", "min" or "max"'),
    ],
)
def test_wrong_rules_are_refused(arguments, error, text):
    with pytest.raises(error, match=text) as caught:
        Keep(**arguments)
    assert "Received: " in str(caught.value)
    assert re.search("Pass|Use", str(caught.value))


HIGHER = ("acc", "val_accuracy", "head_top_5_accuracy", "val_AUC", "dice")
LOWER = ("loss", "val_loss", "dice_loss", "mean_squared_error", "perplexity")


@pytest.mark.parametrize(
    "name",
    [*HIGHER, *LOWER, "accuracy_loss", "categorical_crossentropy"],
)
def test_auto_mode_goes_by_the_name(name):
    assert Keep(best=name).is_max == (name in HIGHER)
    assert Keep(best=name, mode="min").is_max is False
    assert Keep(best=name, mode="max").is_max is True


def test_auto_mode_is_that_of_all_of_keras_metrics():
    required = {
        "SensitivityAtSpecificity": (0.5,),
        "SpecificityAtSensitivity": (0.5,),
        "PrecisionAtRecall": (0.5,),
        "RecallAtPrecision": (0.5,),
        "MeanIoU": (2,),
        "OneHotMeanIoU": (2,),
        "IoU": (2, [0]),
        "OneHotIoU": (2, [0]),
    }
    seen = set()
    for name, kind in vars(keras.metrics).items():
        is_metric = isinstance(kind, type) and issubclass(
            kind, keras.metrics.Metric
        )
        if not is_metric or name in ("Metric", "MeanMetricWrapper"):
            continue
        metric = kind(*required.get(name, ()))
        direction = getattr(metric, "_direction", None)
        if direction is not None:
            is_max = Keep(best=f"val_{metric.name}").is_max
            assert is_max == (direction == "up"), metric.name
            seen.add(direction)
    assert seen == {"up", "down"}


# Deleting.


def step_directory(directory, step):
    path = directory / str(step) / "state"
    path.mkdir(parents=True)
    (path / "_METADATA").write_bytes(b"")
    return path.parent


def test_deleted_step_is_gone(tmp_path):
    for step in (1, 10, 11):
        step_directory(tmp_path, step)
    delete(tmp_path, 1)
    assert names.find_steps(tmp_path) == [10, 11]
    assert len(list(tmp_path.iterdir())) == 2
    delete(tmp_path, 1)
    delete(tmp_path / "none", 1)


def test_links_are_deleted_and_not_followed(tmp_path):
    elsewhere = step_directory(tmp_path / "elsewhere", 5)
    directory = tmp_path / "checkpoints"
    (step_directory(directory, 1) / "run").symlink_to(elsewhere)
    (directory / "2").symlink_to(elsewhere)
    (directory / "3").write_bytes(b"")
    os.mkfifo(directory / "4")
    for step in (1, 2, 3, 4):
        delete(directory, step)
    assert not list(directory.iterdir())
    assert (elsewhere / "state" / "_METADATA").exists()


def test_step_whose_files_stay_is_no_checkpoint(tmp_path, caplog, monkeypatch):
    # What a disk over a network does with files that somebody has open.
    def refuse(path):
        raise OSError(39, "Directory not empty", str(path))

    step_directory(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        delete(tmp_path, 1)
    assert "cannot be deleted: Directory not empty" in caplog.text
    assert names.find_steps(tmp_path) == []
    (left,) = names.find_partial_saves(tmp_path)
    assert delete_partial_saves(tmp_path) == [left.name]
    assert not list(tmp_path.iterdir())


def test_what_killed_saves_left_is_deleted(tmp_path):
    for name in ("2.orbax-checkpoint-tmp", "3", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp").symlink_to(tmp_path / "notes")
    assert delete_partial_saves(tmp_path) == [
        "2.orbax-checkpoint-tmp",
        "4.orbax-checkpoint-tmp",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "notes"]
