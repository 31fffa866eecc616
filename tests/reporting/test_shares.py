"""The shares of a report, beside the times of an independent clock."""

import time

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.cli.main import main
from keras_strategies.reporting import document, run_report
from tests.support.plain_keras import mirrored
from tests.support.stopwatch import Stopwatch


def make_model(*layers, width=3, **compile_args):
    with mirrored(1).scope():
        model = keras.Sequential(
            [keras.Input((width,)), *layers, keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", **compile_args)
    return model


def rows(count, width=3):
    x = np.ones((count, width), "float32")
    return x, x[:, :1]


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_evaluations_in_callbacks(method):
    watch = Stopwatch()
    many, _ = rows(3000)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with watch.timing("evaluate"):
                if method == "evaluate":
                    model.evaluate(many, many[:, :1], batch_size=4, verbose=0)
                else:
                    model.predict(many, batch_size=4, verbose=0)

    model = make_model()
    x, y = rows(400)
    # Without compilations.
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Evaluate()])
    figures = watch.fit(
        model, x, y, callbacks=[Evaluate()], batch_size=4, epochs=3
    )
    share = watch.share("evaluate")
    assert share > 0.5
    assert figures["shares"]["evaluate"] == pytest.approx(share, abs=0.08)
    seconds = watch.seconds - watch.parts["evaluate"]
    assert figures["rows_per_sec"] == pytest.approx(1200 / seconds, rel=0.4)
    assert "evaluates the model" in figures["advice"]


def test_callbacks_that_begin_batches_and_epochs():
    watch = Stopwatch()

    class Sleep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            with watch.timing("callbacks"):
                time.sleep(0.015)

        def on_epoch_begin(self, epoch, logs=None):
            with watch.timing("callbacks"):
                time.sleep(0.4)

    figures = watch.fit(
        make_model(), *rows(80), callbacks=[Sleep()], batch_size=4, epochs=2
    )
    share = watch.share("callbacks")
    assert figures["shares"]["callbacks"] == pytest.approx(share, abs=0.08)
    assert "runs callbacks" in figures["advice"]


class Slow(keras.utils.PyDataset):
    """Batches that four workers read at the same time."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.08)
        return rows(4)


def test_batches_that_come_four_at_a_time():
    watch = Stopwatch()
    figures = watch.fit(
        make_model(), Slow(workers=4, max_queue_size=4), shuffle=False
    )
    assert figures["shares"]["input"] > 0.5
    # 40 batches take 0.8 s; most come at once, after one that is waited for.
    assert figures["input_ms"] == pytest.approx(
        1e3 * watch.seconds / 40, rel=0.5
    )
    assert "waits for input" in figures["advice"]


def test_a_last_execution_of_fewer_steps():
    figures = Stopwatch().fit(
        make_model(steps_per_execution=5), *rows(4 * 103), batch_size=4
    )
    causes = [one["cause"] for one in figures["compilations"]["causes"]]
    assert "a last execution of 3 steps" in causes
    assert "for a last execution of 3 steps: choose" in figures["advice"]
    assert "shapes" not in figures["advice"]


def test_steps_that_run_together_already():
    figures = Stopwatch().fit(
        make_model(steps_per_execution=16), *rows(4 * 16 * 100), batch_size=4
    )
    assert figures["steps_per_program"] == 16
    assert "steps_per_execution=16" not in figures["advice"]


def test_steps_that_run_eagerly():
    figures = Stopwatch().fit(
        make_model(run_eagerly=True), *rows(4 * 60), batch_size=4
    )
    assert "`run_eagerly=True`" in figures["advice"]


def test_the_count_of_operations_is_no_part_of_the_start(monkeypatch):
    began, watch = time.perf_counter(), Stopwatch()
    spent = []
    count = run_report.count_flops

    def count_slowly(model, recorder):
        since = time.perf_counter()
        time.sleep(0.5)
        count(model, recorder)
        spent.append(time.perf_counter() - since)

    monkeypatch.setattr(run_report, "count_flops", count_slowly)
    layers = [keras.layers.Dense(8) for _ in range(10)]
    figures = watch.fit(make_model(*layers), *rows(400), batch_size=4)
    total = time.perf_counter() - began
    assert len(spent) == 1
    assert figures["startup_seconds"] <= total - watch.seconds
    assert figures["seconds"] == pytest.approx(
        watch.seconds - sum(spent), abs=0.15
    )


def test_the_wait_for_the_last_save(tmp_path, monkeypatch):
    watch = Stopwatch()
    close = ks.callbacks.Checkpoint.close

    def close_slowly(self, *, is_done):
        with watch.timing("save"):
            time.sleep(1.0)
            close(self, is_done=is_done)

    monkeypatch.setattr(ks.callbacks.Checkpoint, "close", close_slowly)
    figures = watch.fit(
        make_model(),
        *rows(400),
        callbacks=[ks.callbacks.Checkpoint(tmp_path)],
        batch_size=4,
        epochs=2,
    )
    assert figures["shares"]["save"] >= watch.share("save") - 0.02
    assert figures["shares"]["save"] < watch.share("save") + 0.3
    assert "waits for checkpoints (2 saves)" in figures["advice"]


def test_causes_of_hundreds_of_arrays_are_short(tmp_path):
    with mirrored(1).scope():
        names = [f"feature_{index}_of_the_table" for index in range(250)]
        inputs = {name: keras.Input((1,), name=name) for name in names}
        merged = keras.layers.Concatenate()(list(inputs.values()))
        model = keras.Model(inputs, keras.layers.Dense(1)(merged))
        model.compile("sgd", "mse")
    y = np.ones((10, 1), "float32")
    figures = Stopwatch().fit(
        model, dict.fromkeys(names, y), y, batch_size=4, directory=tmp_path
    )
    size = (tmp_path / document.NAME).stat().st_size
    assert all(
        len(one["cause"]) < 250 for one in figures["compilations"]["causes"]
    )
    assert size * document.MAX_STARTS < 2 << 20


def test_a_number_that_no_float_holds_is_one_line(tmp_path, capsys):
    report = document.add_start(None, 0.0, 0)
    figures = document.EMPTY | {"rows_per_sec": 10**400}
    document.save_report(
        tmp_path, document.update_start(report, 5, figures, is_done=True)
    )
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
