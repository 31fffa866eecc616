"""Reports of fits in one process: the sentence names the true cause."""

import dataclasses
import errno
import json
import time
import warnings

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.names import phases
from keras_strategies.reporting import advice, document, figures, run_report
from keras_strategies.tpu.chips import GPUS
from tests.callbacks.test_scalars import read
from tests.support.plain_keras import mirrored

RunReport = ks.callbacks.RunReport
_random = np.random.default_rng(0)


def fit(report, *callbacks, model=None, **changes):
    """Trains a small model for 2 epochs of 4 batches, unless told otherwise."""
    model = model or dense_model()
    x, y = rows(16)
    arguments = {"x": x, "y": y, "batch_size": 4, "epochs": 2, "verbose": 0}
    arguments |= changes
    if arguments["y"] is None:
        del arguments["batch_size"]
    return model.fit(callbacks=[*callbacks, report], **arguments)


def rows(count):
    x = _random.normal(size=(count, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def dense_model(**compile_args):
    with mirrored(1).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compile_args)
    return model


def embedding_model():
    with mirrored(1).scope():
        model = keras.Sequential(
            [
                keras.layers.Embedding(9, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore:.*shuffle=True")
def test_slow_generator_is_named(capsys):
    def slow():
        for _ in range(40):
            time.sleep(0.03)
            yield rows(4)

    report = RunReport()
    fit(report, x=slow(), y=None, steps_per_epoch=20)
    advice = report.figures["advice"]
    assert "waits for input: make the data faster" in advice
    shares = report.figures["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert advice.startswith(f"{100 * shares['input']:.0f} %")
    times = report.figures["step_ms"]
    assert 25 < times["median"] <= times["p95"]
    assert report.figures["rows_per_sec"] < 4 / 0.02
    printed = " ".join(capsys.readouterr().out.split())
    assert advice in printed
    assert "waiting for input" in printed


@pytest.mark.filterwarnings("ignore:.*shuffle=True")
def test_new_shapes_are_named():
    def growing():
        for epoch in range(3):
            for _ in range(4):
                yield _random.integers(0, 9, (4, 5 + epoch)), np.ones((4, 1))

    report = RunReport(verbose=False)
    model = embedding_model()
    fit(report, model=model, x=growing(), y=None, steps_per_epoch=4, epochs=3)
    assert "compiles the step for new shapes" in report.figures["advice"]
    assert "x (4, 6)" in report.figures["advice"]
    assert "x (4, 7)" in report.figures["advice"]
    made = report.figures["compilations"]
    causes = {one["cause"]: one for one in made["causes"]}
    assert any(name.startswith("a new shape: x (4, 6)") for name in causes)
    assert causes["the first step"]["seconds"] > 0.05
    assert made["seconds"] >= sum(one["seconds"] for one in causes.values())


def test_saves_at_each_step_are_named(tmp_path):
    checkpoint = ks.callbacks.Checkpoint(tmp_path, save_every_steps=1)
    report = RunReport(verbose=False)
    fit(report, checkpoint, epochs=4)
    assert "waits for checkpoints (16 saves)" in report.figures["advice"]
    # Beside the checkpoints, and no checkpoint to the list of them.
    written = json.loads((tmp_path / "run_report.json").read_text())
    assert written["starts"][-1]["figures"] == report.figures
    assert written["starts"][-1]["is_done"] is True
    assert written["num_steps"] == 16


def test_a_fit_without_steps_leaves_the_report_as_it_is(tmp_path, capsys):
    checkpoint = ks.callbacks.Checkpoint(tmp_path)
    fit(RunReport(), checkpoint)
    written = (tmp_path / "run_report.json").read_text()
    capsys.readouterr()
    # The run has ended, so `fit` trains no further steps.
    fit(report := RunReport(), checkpoint)
    assert (tmp_path / "run_report.json").read_text() == written
    assert report.figures["steps"] == 0
    assert capsys.readouterr().out == ""


def test_short_steps_are_named(monkeypatch):
    # On a busy machine, short batches wait longer than this for a core.
    monkeypatch.setattr(advice, "_SHORT_MS", 1e3)
    report = RunReport(verbose=False)
    x, y = rows(4 * 600)
    fit(report, x=x, y=y)
    assert report.figures["shares"]["python"] > 0.05
    assert "runs Python between the programs" in report.figures["advice"]
    assert "steps_per_execution" in report.figures["advice"]


def test_long_steps_blame_nothing_else():
    with mirrored(1).scope():
        layers = [keras.layers.Dense(800) for _ in range(3)]
        model = keras.Sequential([keras.Input((800,)), *layers])
        model.compile("sgd", "mse")
    x = np.ones((512 * 8, 800), "float32")
    report = RunReport(verbose=False)
    fit(report, model=model, x=x, y=x, batch_size=512)
    assert "is spent in the step's programs" in report.figures["advice"]


def test_evaluations_and_callbacks_are_named():
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    report = RunReport(verbose=False)
    fit(report, Slow(), epochs=4)
    assert "runs callbacks" in report.figures["advice"]
    x, y = rows(3_000)
    report = RunReport(verbose=False)
    fit(report, epochs=4, validation_data=(x, y), validation_batch_size=8)
    assert "evaluates the model" in report.figures["advice"]
    # Steps of evaluations are not steps of training.
    assert report.figures["steps"] == 16


def test_logs_have_the_speed(tmp_path):
    scalars = ks.callbacks.Scalars(tmp_path, every_n_steps=2)
    report = RunReport(verbose=False)
    history = fit(report, scalars).history
    names = {"step_ms", "rows_per_sec", "input_share"}
    assert names < set(history)
    assert all(value > 0 for value in history["step_ms"])
    points = read(tmp_path)
    assert names < set(points)
    assert list(points["step_ms"])[-3:] == [4, 6, 8]


def test_tokens_are_those_of_sequences_of_tokens_only():
    report = RunReport(verbose=False)
    x = _random.integers(0, 9, (16, 5))
    fit(report, model=embedding_model(), x=x, y=np.ones((16, 1)))
    rate = report.figures["tokens_per_sec"]
    assert rate == pytest.approx(5 * report.figures["rows_per_sec"])
    # Integers that no layer embeds are not tokens.
    fit(report, x=_random.integers(0, 9, (16, 3)), y=np.ones((16, 1)))
    assert "tokens_per_sec" not in report.figures


def test_operations_of_a_dense_model(monkeypatch):
    report = RunReport(verbose=False)
    history = fit(report).history
    rate = report.figures["flops_per_sec"]
    # A product forward, and one for the gradients of the weights.
    assert rate == pytest.approx(2 * 2 * 3 * report.figures["rows_per_sec"])
    # CPUs have no peak.
    assert "mfu" not in report.figures
    assert "mfu" not in history
    # The specifications of a chip take the place of the unknown ones.
    chip = dataclasses.replace(GPUS["h100"], flops=1e9)
    monkeypatch.setattr(figures, "find_chip", lambda device: chip)
    history = fit(report).history
    mfu = report.figures["flops_per_sec"] / 1e9
    assert report.figures["mfu"] == pytest.approx(mfu)
    assert history["mfu"][-1] == pytest.approx(mfu, rel=0.5)


class Sampler(keras.Model):
    """Samples in a loop of unknown length, which has no gradients."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, x, training=False):
        y = self.inner(x)
        if training:
            return y
        return keras.ops.while_loop(
            lambda y: keras.ops.max(y) < 0.0, lambda y: (y + 1.0,), (y,)
        )[0]


def test_operations_without_gradients_are_left_out():
    with mirrored(1).scope():
        model = Sampler()
        model.compile("sgd", "mse")
    report = RunReport(verbose=False)
    fit(report, model=model)
    assert "flops_per_sec" not in report.figures
    assert report.figures["steps"] == 8


def test_steps_of_one_execution_are_counted_each():
    report = RunReport(verbose=False)
    model = dense_model(steps_per_execution=2)
    fit(report, model=model, epochs=5)
    assert report.figures["steps"] == 20
    assert report.figures["compilations"]["count"] >= 1


def test_an_error_in_fit_ends_the_recording(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(RunReport(tmp_path), Stop())
    assert phases._recorders == ()
    written = json.loads((tmp_path / "run_report.json").read_text())
    assert written["starts"][-1]["is_done"] is False
    assert written["num_steps"] == 4
    # JAX's event has no listener of the report's.
    fit(report := RunReport(verbose=False))
    count = report.figures["compilations"]["count"]
    jax.jit(lambda x: x + 3)(1)
    assert report.figures["compilations"]["count"] == count


class FillDisk(keras.callbacks.Callback):
    """Fills the disk before a step: no file can grow any more."""

    def __init__(self, monkeypatch, step):
        super().__init__()
        self.monkeypatch, self.step = monkeypatch, step

    def on_train_batch_begin(self, batch, logs=None):
        self.step -= 1
        if self.step == 0:
            self.fill()

    def fill(self):
        def fail(value, file):
            raise OSError(errno.ENOSPC, "No space left on device", file.name)

        self.monkeypatch.setattr(document.json, "dump", fail)


def test_a_disk_that_fills_ends_the_report_and_not_the_training(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_report, "_WRITE_S", 0.0)
    report = RunReport(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        history = fit(report, FillDisk(monkeypatch, 3), epochs=4).history
    assert len(history["loss"]) == 4
    assert report.figures["steps"] == 16
    assert "time of a step" in capsys.readouterr().out
    # One warning, although each epoch wanted to write.
    (warning,) = caught
    assert "training continues without it" in str(warning.message)
    assert "No space left on device" in str(warning.message)
    written = json.loads((tmp_path / "run_report.json").read_text())
    assert written["starts"][-1]["figures"]["steps"] == 2


def test_a_report_that_cannot_be_closed_keeps_the_error(monkeypatch, caplog):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise InterruptedError

    def fail(figures):
        raise KeyError("a problem")

    monkeypatch.setattr(run_report, "write_advice", fail)
    with pytest.raises(InterruptedError):
        fit(RunReport(), Stop())
    assert "A report of the fit was not closed." in caplog.text
    assert "a problem" in caplog.text


def test_a_fit_of_a_single_long_step(capsys):
    with mirrored(1).scope():
        hidden = [keras.layers.Dense(1024) for _ in range(4)]
        model = keras.Sequential([*hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((512, 1024), "float32")
    fit(RunReport(), model=model, x=x, y=x[:, :1], batch_size=512, epochs=1)
    assert "Too few steps were trained" in capsys.readouterr().out


def test_a_plain_model_is_refused():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="`RunReport` can only follow a mod"):
        fit(RunReport(), model=model)


def test_wrong_directories_are_refused():
    with pytest.raises(TypeError, match="PathLike"):
        RunReport(3)
