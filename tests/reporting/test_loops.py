"""Reports of training loops other than `fit`."""

import json
import time

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.names import phases
from tests.support.plain_keras import mirrored


class Loop:
    """A model of two replicas, and a train step of a loop."""

    def __init__(self):
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((None, 3)), keras.layers.Dense(1)]
            )
            self.optimizer = keras.optimizers.SGD()
            self.optimizer.build(self.model.trainable_variables)

    def train(self, x):
        loss, grads = ks.value_and_grad(
            lambda: keras.ops.mean(self.model(x) ** 2),
            self.model.trainable_variables,
        )()
        self.optimizer.apply(grads, self.model.trainable_variables)
        return loss

    def run(self, report, batches):
        rows = 4
        distributed = self.strategy.experimental_distribute_dataset(batches)
        for batch in distributed:
            with report.step(rows=rows, tokens=3 * rows):
                self.strategy.run(self.train, args=(batch,))


def batches(count, seconds=0.0, lengths=(3,)):
    for index in range(count):
        time.sleep(seconds)
        length = lengths[index * len(lengths) // count]
        yield np.ones((4, length, 3), "float32")


def test_slow_data_are_named(tmp_path, capsys):
    with ks.callbacks.RunReport(tmp_path) as report:
        Loop().run(report, batches(20, 0.03))
    figures = report.figures
    assert "waits for input: make the data faster" in figures["advice"]
    assert figures["advice"] in " ".join(capsys.readouterr().out.split())
    assert figures["steps"] == 20
    assert figures["step_ms"]["median"] > 25
    assert figures["rows_per_sec"] < 4 / 0.02
    assert figures["tokens_per_sec"] == pytest.approx(
        3 * figures["rows_per_sec"]
    )
    written = json.loads((tmp_path / "run_report.json").read_text())
    assert written["num_steps"] == 20
    assert written["starts"][0]["figures"] == figures


def test_new_shapes_are_named():
    with ks.callbacks.RunReport(verbose=False) as report:
        Loop().run(report, batches(9, lengths=(3, 4, 5)))
    assert "compiles the step for new shapes" in report.figures["advice"]
    assert "(4, 5, 3)" in report.figures["advice"]


def test_a_loop_that_goes_on_counts_repeated_steps(tmp_path):
    loop, report = Loop(), ks.callbacks.RunReport(tmp_path, verbose=False)
    report.begin()
    for _ in range(5):
        with report.step():
            pass
    # As if an error had ended the loop.
    report.close()
    report.begin(step=3)
    loop.run(report, batches(7))
    assert report.finish()["steps"] == 7
    written = json.loads((tmp_path / "run_report.json").read_text())
    assert written["num_repeated"] == 2
    assert written["num_steps"] == 10


def test_an_error_in_a_loop_ends_the_recording():
    report = ks.callbacks.RunReport()
    with pytest.raises(InterruptedError), report, report.step():
        raise InterruptedError
    assert phases._recorders == ()
    assert report.figures["steps"] == 0
    match = "between `begin` and `finish`"
    with pytest.raises(RuntimeError, match=match), report.step():
        pass
    with pytest.raises(ValueError, match="`step` must"):
        report.begin(step=-1)
