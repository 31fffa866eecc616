"""`ks.callbacks.Checkpoint`: when it saves, what it refuses, what it says."""

import errno
import json
import logging
import re
import shutil
import signal
import stat
import subprocess
import threading
import time

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.checkpoint.directory import manifest
from keras_strategies.checkpoint.directory.lock import DirectoryLock
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.cluster.exchange.exit_codes import Preempted
from tests.support.checkpoint import cases
from tests.support.checkpoint.cases import Batches, of, unnumbered
from tests.support.checkpoint.damages import DAMAGES
from tests.support.checkpoint.runs import (
    Case,
    Interrupted,
    Runner,
    Seen,
    Stopping,
    X,
    Y,
    assert_equal,
    usual,
)
from tests.support.combinations import combine, few
from tests.support.models import chain
from tests.support.plain_keras import mirrored

Checkpoint = ks.callbacks.Checkpoint
SELDOM = {"save_every_steps": None, "save_every_epochs": 99}
VALIDATED = {"validation_data": (X[:12], Y[:12])}


@pytest.fixture(scope="module")
def runner():
    return Runner(Case("usual", data=of(**VALIDATED)))


@pytest.fixture(scope="module")
def whole(runner, tmp_path_factory):
    """A run that nobody interrupted, with checkpoints of steps 5, 10, 12."""
    directory = tmp_path_factory.mktemp("whole")
    # A first fit draws an order more, to build the metrics.
    fit(runner, epochs=1, **VALIDATED)
    outcome, told = runner.run(directory, save_every_steps=5)
    return directory, outcome, told


def fit(runner, *callbacks, **arguments):
    given = {"x": X, "y": Y, "batch_size": 8, "verbose": 0} | arguments
    return runner.reset().fit(**given, callbacks=list(callbacks))


# Interruptions.


@pytest.mark.parametrize(
    ("where", "count", "saved"),
    few(
        [
            ("batch", 7, 5),
            ("validation", 1, None),
            ("validation", 3, 5),
            pytest.param("batch", 1, None, marks=pytest.mark.slow),
            pytest.param("batch", 8, 5, marks=pytest.mark.slow),
            pytest.param("batch", 10, 5, marks=pytest.mark.slow),
        ],
        every=3,
    ),
)
def test_a_fit_that_a_callback_ended_goes_on(
    runner, whole, tmp_path, where, count, saved
):
    with pytest.raises(Interrupted):
        runner.run(tmp_path, stop=count, where=where, save_every_steps=5)
    # Others run before the checkpoint is saved.
    assert find_steps(tmp_path / "kept")[-1:] == ([saved] if saved else [])
    seed = 1 if saved is None else 5
    ours, _ = runner.run(tmp_path, seed=seed, save_every_steps=5)
    assert_equal(ours, whole[1])


def test_checkpoints_change_no_number(runner, whole, tmp_path):
    case = runner.case
    model = runner.reset()
    np.random.seed(1)
    history = model.fit(
        **case.data(), epochs=3, verbose=0, callbacks=usual(tmp_path)
    )
    assert history.history == whole[1]["history"]


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_finished_run_trains_nothing_and_warns(
    runner, whole, verbose, caplog
):
    directory, expected, _ = whole
    log = (directory / "log.csv").read_text()
    ours, told = runner.run(directory, seed=5, verbose=verbose)
    assert_equal(ours, expected)
    assert not told
    assert (directory / "log.csv").read_text() == log
    (text,) = [r.getMessage() for r in caplog.records]
    assert "has ended after 12 steps, so `fit` trains no further steps." in text
    assert "Pass more `epochs`" in text


def test_a_run_that_a_callback_ended_is_over(runner, tmp_path, caplog):
    model = runner.reset()
    callbacks = [Stopping(), ks.callbacks.Checkpoint(tmp_path / "kept")]
    given = {"batch_size": 8, "verbose": 0, "callbacks": callbacks}
    model.fit(X, Y, epochs=3, **given)
    assert not caplog.records
    history = model.fit(X, Y, epochs=9, **given)
    (text,) = [r.getMessage() for r in caplog.records]
    assert "A callback stopped it, as EarlyStopping does." in text
    assert history.epoch == [0, 1]


def test_a_log_keeps_its_columns(runner, tmp_path):
    """Also where the first epoch that is logged again has others."""

    def log(directory, *ends):
        directory.mkdir()
        model = runner.reset()
        for end in ends:
            rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
            logger = keras.callbacks.CSVLogger(directory / "log.csv")
            model.fit(
                **of(**VALIDATED, shuffle=False)(),
                epochs=end,
                validation_freq=2,
                verbose=0,
                callbacks=[rate, logger, Checkpoint(directory / "kept")],
            )
        return (directory / "log.csv").read_text()

    assert log(tmp_path / "ours", 1, 2) == log(tmp_path / "whole", 2)


@pytest.mark.parametrize("steps", [None, 2])
def test_a_fit_after_one_that_is_over_finds_the_same_seed(
    runner, tmp_path, steps
):
    drawn = []
    for _ in range(2):
        np.random.seed(1)
        fit(runner, Checkpoint(tmp_path), epochs=3, steps_per_epoch=steps)
        drawn.append(np.random.random())
    assert drawn[0] == drawn[1]


def test_more_epochs_go_on(runner, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "copy")
    expected, _ = runner.run(tmp_path / "expected", epochs=5, **SELDOM)
    ours, told = runner.run(tmp_path / "copy", seed=5, epochs=5, **SELDOM)
    assert_equal(ours, expected)
    assert [index for what, index, _ in told if what == "epoch"] == [3, 4]


def test_the_progress_bar_goes_on_where_it_was(runner, whole, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.mkdir()
    shutil.copytree(whole[0] / "kept" / "10", kept / "10")
    runner.run(tmp_path, seed=5, verbose=1)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "Resuming from step 10" in out
    assert "epoch 3, after 2 of its steps" in out
    assert "Epoch 3/3" in out
    assert "4/4" in out
    assert "Epoch 2/3" not in out
    assert "1/4" not in out


def test_on_sigterm_it_saves_and_raises(runner, whole, tmp_path, request):
    calls = []

    def own(*_):
        calls.append(1)

    before = signal.signal(signal.SIGTERM, own)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with pytest.raises(Preempted):
        runner.run(tmp_path, stop=6, where="SIGTERM", save_every_steps=5)
    signal.raise_signal(signal.SIGTERM)  # Ignored while the process ends.
    assert calls == [1]
    with subprocess.Popen(["sleep", "60"]) as child:
        child.terminate()  # Children do not ignore it.
        try:
            assert child.wait(10) == -signal.SIGTERM
        finally:
            child.kill()
    assert find_steps(tmp_path / "kept") == [5, 6]
    ours, _ = runner.run(tmp_path, seed=5)
    assert_equal(ours, whole[1])


# When it saves, and what is kept.


@pytest.mark.parametrize(
    ("options", "steps"),
    few(
        [
            ({}, [4, 8, 12]),
            ({"save_every_epochs": 2}, [8, 12]),
            ({"save_every_steps": 5}, [5, 10, 12]),
            ({"save_every_steps": 4}, [4, 8, 12]),
            ({"save_every_steps": 100}, [12]),
            ({"save_every_seconds": 1e-6}, list(range(1, 13))),
            ({"save_every_seconds": 1e6}, [12]),
            (
                {"save_every_steps": 5, "save_every_epochs": 1},
                [4, 5, 8, 10, 12],
            ),
            ({"save_every_steps": 3, "keep": 2}, [9, 12]),
            ({"save_every_steps": 5, "keep": ks.checkpoint.Keep(last=1)}, [12]),
        ],
        every=2,
    ),
    ids=str,
)
def test_it_saves_when_it_is_told_to(runner, tmp_path, options, steps):
    fit(runner, Checkpoint(tmp_path, **{"keep": 99} | options), epochs=3)
    assert find_steps(tmp_path) == steps


def test_the_best_is_kept(runner, tmp_path):
    keep = ks.checkpoint.Keep(last=1, best="val_loss", mode="max")
    history = fit(
        runner, Checkpoint(tmp_path, keep=keep), epochs=3, **VALIDATED
    )
    worst = int(np.argmax(history.history["val_loss"]))
    assert find_steps(tmp_path) == sorted({4 * (worst + 1), 12})
    facts = manifest.read_manifest(tmp_path / "12").facts
    assert facts["logs"]["val_loss"] == history.history["val_loss"][-1]
    assert (facts["epoch"], facts["step_in_epoch"]) == (3, 0)


@pytest.mark.parametrize(
    ("best", "validation_freq", "is_told"),
    few(
        [
            ("accuraccy", 1, True),
            ("val_accuraccy", 1, True),
            ("val_loss", 2, False),
            ("loss", 1, False),
        ],
        every=2,
    ),
)
def test_a_best_that_is_nowhere_is_reported_once(
    runner, tmp_path, caplog, best, validation_freq, is_told
):
    keep = ks.checkpoint.Keep(last=2, best=best, mode="max")
    with caplog.at_level(logging.WARNING):
        fit(
            runner,
            Checkpoint(tmp_path, keep=keep),
            epochs=3,
            validation_freq=validation_freq,
            **VALIDATED,
        )
    told = [r.getMessage() for r in caplog.records if "best" in r.getMessage()]
    assert len(told) == is_told
    if told:
        assert f"Received: best={best!r}" in told[0]
        assert "'loss', 'mae', 'val_loss'" in told[0]


def test_directories_are_the_users_alone(runner, tmp_path):
    fit(runner, Checkpoint(tmp_path / "kept"), epochs=1)
    for path in (tmp_path / "kept", tmp_path / "kept" / "4"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


# What is damaged, in the way, or cannot be written.

SHOWN = ("flipped byte in process's d", "missing manifest", "linked step")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            damage,
            marks=[] if damage.name in SHOWN else [pytest.mark.slow],
        )
        for damage in DAMAGES
        if not damage.is_of_devices
    ],
    ids=str,
)
def test_a_damaged_checkpoint_is_put_aside(
    runner, whole, tmp_path, damage, caplog
):
    for step in (5, 10):
        shutil.copytree(
            whole[0] / "kept" / str(step), tmp_path / "kept" / str(step)
        )
    shutil.copy(whole[0] / "log.csv", tmp_path)
    damage(tmp_path / "kept" / "10")
    with caplog.at_level(logging.WARNING):
        ours, told = runner.run(tmp_path, seed=5, save_every_steps=5)
    assert_equal(ours, whole[1])
    # From step 5: the second epoch's second step.
    assert told[0][:2] == ["begins", 1]
    (text,) = [r.getMessage() for r in caplog.records if "damaged" in r.message]
    assert str(tmp_path / "kept" / "10") in text
    assert "It was renamed to 10.damaged-" in text
    assert list((tmp_path / "kept").glob("10.damaged-*"))
    assert find_steps(tmp_path / "kept") == [5, 10, 12]


def test_all_damaged_is_as_none(runner, whole, tmp_path):
    shutil.copytree(whole[0] / "kept", tmp_path / "kept")
    for path in (tmp_path / "kept").glob("[0-9]*"):
        (path / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        fit(runner, Checkpoint(tmp_path / "kept", resume=True))
    ours, _ = runner.run(tmp_path, save_every_steps=5)
    assert_equal(ours, whole[1])


def test_a_directory_that_nobody_can_make(runner):
    with pytest.raises(OSError, match="must be a directory that is writable"):
        fit(runner, Checkpoint("/proc/run"))


def test_a_full_disk_ends_the_run_and_leaves_the_last_one(
    runner, whole, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)

    class Filling(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                full = usage._replace(free=10)
                monkeypatch.setattr(shutil, "disk_usage", lambda path: full)

    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(OSError, match="does not fit on the disk") as raised:
        fit(runner, Filling(), checkpoint, epochs=3)
    assert raised.value.errno == errno.ENOSPC
    assert find_steps(tmp_path) == [4]
    monkeypatch.undo()
    assert fit(runner, Checkpoint(tmp_path), epochs=2).epoch == [0, 1]


class Losing(keras.callbacks.Callback):
    """Has the directory's disk fail in the middle of a save."""

    def __init__(self, directory, epoch):
        super().__init__()
        self.directory, self.epoch = directory, epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            # Where the next one is to be: it cannot be renamed to that.
            (self.directory / str(4 * (epoch + 1))).mkdir()
            path = self.directory / str(4 * (epoch + 1)) / "in the way"
            path.write_text("")


@pytest.mark.parametrize("epoch", combine([1, 2], every=2))
def test_a_save_that_fails_in_the_background(runner, tmp_path, epoch):
    # At the next save, or at the end.
    step = 4 * (epoch + 1)
    with pytest.raises(OSError, match=f"of step {step} could not be written"):
        fit(runner, Losing(tmp_path, epoch), Checkpoint(tmp_path), epochs=3)
    assert manifest.read_manifest(tmp_path / str(4 * epoch)).step == 4 * epoch
    # What was in the way is no checkpoint.
    history = fit(runner, Checkpoint(tmp_path), epochs=3)
    assert history.epoch == [0, 1, 2]
    assert find_steps(tmp_path) == [4, 8, 12][-5:]


def test_two_runs_in_one_directory(runner, tmp_path, monkeypatch):
    lock = DirectoryLock(tmp_path)
    acquire = DirectoryLock.acquire
    monkeypatch.setattr(
        DirectoryLock, "acquire", lambda self: acquire(self, 0.1)
    )
    with lock, pytest.raises(RuntimeError, match="Only one run at a time"):
        fit(runner, Checkpoint(tmp_path))
    fit(runner, Checkpoint(tmp_path))


def test_an_error_frees_the_directory(runner, tmp_path):
    with pytest.raises(Interrupted):
        fit(runner, Seen(stop=1), Checkpoint(tmp_path))
    with DirectoryLock(tmp_path):
        pass
    kept = [t for t in threading.enumerate() if "checkpoint" in t.name]
    assert not [t for t in kept if t.name.startswith("keras_strategies")]


# What it refuses.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"directory": ""}, ValueError, "`directory` must not be empty"),
        (
            {"save_every_steps": 0},
            ValueError,
            "steps` must be > 0. Received: 0",
        ),
        ({"save_every_steps": True}, TypeError, "Received: True"),
        ({"save_every_steps": 2.0}, TypeError, "Received: 2.0"),
        ({"save_every_epochs": -1}, ValueError, "Received: -1"),
        ({"save_every_seconds": 0}, ValueError, "> 0. Received: 0"),
        ({"save_every_seconds": "1"}, TypeError, "Received: '1'"),
        (
            {"save_every_seconds": float("nan")},
            ValueError,
            "must be finite. Received: nan",
        ),
        ({"resume": "always"}, ValueError, "resume='always'"),
        ({"directory": b"x"}, TypeError, "type bytes"),
        ({"directory": None}, TypeError, "type NoneType"),
        ({"keep": "all"}, TypeError, "`last` must be an integer"),
        ({"keep": -1}, ValueError, "last"),
    ],
    ids=str,
)
def test_arguments_are_checked(options, error, text):
    options = {"directory": "x"} | options
    with pytest.raises(error, match=re.escape(text)):
        Checkpoint(**options)


def test_resume_says_what_must_be_there(runner, whole, tmp_path):
    with pytest.raises(FileNotFoundError, match="`resume=True`"):
        fit(runner, Checkpoint(tmp_path, resume=True))
    with pytest.raises(FileExistsError, match="step 12"):
        fit(runner, Checkpoint(whole[0] / "kept", resume=False))
    fit(runner, Checkpoint(tmp_path, resume=False))
    assert find_steps(tmp_path) == [4]


@pytest.mark.parametrize("other", ["Checkpoint", "BackupAndRestore"])
def test_one_callback_decides(runner, tmp_path, other):
    rival = (
        Checkpoint(tmp_path / "b")
        if other == "Checkpoint"
        else keras.callbacks.BackupAndRestore(tmp_path / "b")
    )
    with pytest.raises(ValueError, match=f"Received: Checkpoint, {other}"):
        fit(runner, Checkpoint(tmp_path / "a"), rival)
    assert not (tmp_path / "a").exists()


def test_a_list_of_callbacks_of_the_users(runner, tmp_path):
    model = runner.reset()
    listed = keras.callbacks.CallbackList(
        [Checkpoint(tmp_path)], model=model, add_history=True
    )
    for callbacks in (listed, [listed]):
        with pytest.raises(ValueError, match="Pass a plain list"):
            model.fit(X, Y, verbose=0, callbacks=callbacks)


def test_a_model_of_no_strategy(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="was compiled outside a strategy"):
        model.fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])


def compiled(make, **options):
    with mirrored(2).scope():
        model = make()
        model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model


def test_another_model_is_refused_and_the_problems_listed(whole, tmp_path):
    model = compiled(
        lambda: chain(
            (4,),
            keras.layers.Dense(7, name="hidden"),
            keras.layers.Dense(1, name="out"),
        )
    )
    with pytest.raises(ValueError, match="with another model") as raised:
        model.fit(X, Y, verbose=0, callbacks=[Checkpoint(whole[0] / "kept")])
    text = str(raised.value)
    assert str(whole[0] / "kept" / "12") in text
    assert re.search(r"model: weights sequential\w*.+: not in the model", text)
    assert "and 23 more" in text
    assert find_steps(whole[0] / "kept") == [5, 10, 12]


def monitor_units(units):
    return lambda: chain(
        (4,), keras.layers.Dense(units), keras.layers.Dense(1, name="flat")
    )


@pytest.mark.parametrize(
    ("units", "options", "what"),
    [
        (3, {"optimizer": "adam"}, "optimizer: optimizer "),
        (3, {"metrics": ["mae"]}, "metrics: metrics mean"),
        (3, {"optimizer": "adam", "metrics": ["mae"]}, "metrics or optimizer:"),
        # The weights are reported first.
        (
            5,
            {"optimizer": "adam"},
            r"model: weights .*: float32\[4, 3\] in",
        ),
    ],
    ids=str,
)
def test_what_is_another_is_reported(tmp_path, units, options, what):
    first = compiled(monitor_units(3))
    first.fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])
    second = compiled(monitor_units(units), **options)
    with pytest.raises(
        ValueError, match=f"which was saved with another {what}"
    ):
        second.fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])


def test_names_that_keras_numbers_are_no_matter(tmp_path):
    first = compiled(unnumbered)
    first.fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])
    second = compiled(unnumbered)
    assert first.weights[0].path != second.weights[0].path
    second.fit(X, Y, verbose=0, callbacks=[Checkpoint(tmp_path)])
    for one, two in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())


@pytest.mark.parametrize(
    ("other", "what"),
    few(
        [
            (
                {"batch_size": 16},
                "run: 8 rows a batch, now 16; 4 batches, now 2.",
            ),
            ({"x": X[:24], "y": Y[:24]}, "run: 4 batches, now 3; "),
            ({"x": X[:30], "y": Y[:30]}, "run: 32 rows, now 30."),
            (
                {"x": Batches(16), "y": None, "batch_size": None},
                "run: another kind or order; 4 batches, now 2.",
            ),
            (
                {"y": None, "batch_size": None} | cases.pydataset(),
                "run: another kind or order.",
            ),
            ({}, None),
        ],
        every=2,
    ),
    ids=[
        *("batch size", "fewer batches", "rows"),
        *("other kind", "of as many rows", "same"),
    ],
)
def test_other_batches_in_the_middle_of_an_epoch_are_reported(
    runner, tmp_path, other, what, caplog
):
    with pytest.raises(Interrupted):
        fit(runner, Seen(stop=3), Checkpoint(tmp_path, save_every_steps=2))
    assert find_steps(tmp_path) == [2]
    fit(runner, Checkpoint(tmp_path, save_every_steps=2), **other)
    texts = [r.getMessage() for r in caplog.records if r.levelname != "INFO"]
    if what is None:
        assert not texts
    else:
        (text,) = texts
        assert what in text
        assert "rows may be seen twice or not at all" in text


KINDS = {
    "arrays": dict,
    "PyDataset": cases.pydataset,
    "tf.data": cases.tf_dataset,
    "grain": cases.grain_dataset,
    "torch": cases.torch_loader,
    "generator": cases.generator,
}


@pytest.mark.parametrize(
    ("first", "second"),
    few(
        [
            (first, second)
            for first in KINDS
            for second in KINDS
            # Neither has an order of ours: the place in the infinite pass
            # counts.
            if (first, second) != ("generator", "grain")
        ],
        every=7,
    ),
)
def test_another_kind_of_data_after_an_epoch_is_no_matter(
    runner, tmp_path, first, second, caplog
):
    def given(kind):
        if kind == "arrays":
            return {}
        return {"y": None, "batch_size": None, "shuffle": False} | KINDS[kind]()

    fit(runner, Checkpoint(tmp_path), **given(first))
    (done,) = find_steps(tmp_path)
    fit(runner, Checkpoint(tmp_path), epochs=2, **given(second))
    assert not [r for r in caplog.records if r.levelname != "INFO"]
    steps = 3 if second == "generator" else 4
    assert find_steps(tmp_path) == [done, done + steps]


def test_other_batches_after_an_epoch_are_no_matter(runner, tmp_path, caplog):
    fit(runner, Checkpoint(tmp_path))
    fit(runner, Checkpoint(tmp_path), epochs=2, batch_size=16)
    assert not [r for r in caplog.records if r.levelname != "INFO"]
    assert find_steps(tmp_path) == [4, 6]


def test_states_that_json_cannot_hold_are_refused(runner, tmp_path):
    class Odd(keras.callbacks.Callback):
        def get_state(self):
            return {"a": [{1, 2}]}

        def set_state(self, state):
            raise AssertionError

    with pytest.raises(TypeError, match=r"type set at .*'a'.*get_state"):
        fit(runner, Odd(), Checkpoint(tmp_path))
    assert find_steps(tmp_path) == []


def test_a_format_of_later_is_refused(runner, whole, tmp_path):
    shutil.copytree(whole[0] / "kept" / "12", tmp_path / "12")
    path = tmp_path / "12" / "run" / "metadata"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"version": 99}))
    (tmp_path / "12" / "manifest.json").unlink()
    manifest.write_manifest(tmp_path / "12", 12, {})
    with pytest.raises(ValueError, match="with format 99"):
        fit(runner, Checkpoint(tmp_path))
    assert find_steps(tmp_path) == [12]


def test_a_checkpoint_deleted_while_it_is_read(
    runner, whole, tmp_path, monkeypatch
):
    from keras_strategies.checkpoint import contents

    shutil.copytree(whole[0] / "kept" / "12", tmp_path / "12")
    targets = contents.make_targets

    def after_deletion(*args):
        shutil.rmtree(tmp_path / "12")
        return targets(*args)

    monkeypatch.setattr(contents, "make_targets", after_deletion)
    start = time.monotonic()
    with pytest.raises(ks.checkpoint.DamagedCheckpoint, match="deleted"):
        fit(runner, Checkpoint(tmp_path))
    assert time.monotonic() - start < 20
