"""Fits of which one process is slower; see `run_processes`."""

import contextlib
import io
import time

import jax
import keras

import keras_strategies as ks
from tests.multi_process.scenarios import build, data

STEPS = 60
SLOW_S = 0.05


class Slow(keras.callbacks.Callback):
    """Takes its time after each batch, in process 1."""

    def on_train_batch_end(self, batch, logs=None):
        if jax.process_index() == 1:
            time.sleep(SLOW_S)


def slow_input(directory):
    """The batches of process 1 are slow to read."""

    def batches():
        x, y = data(8)
        for _ in range(STEPS):
            if jax.process_index() == 1:
                time.sleep(SLOW_S)
            yield x, y

    report = ks.callbacks.RunReport(directory)
    return _fit(report, x=batches())


def slow_callback():
    """A callback of process 1 is slow, and no file is written."""
    x, y = data(8 * STEPS)
    report = ks.callbacks.RunReport()
    return _fit(report, Slow(), x=x, y=y, batch_size=8)


def _fit(report, *callbacks, **arguments):
    model = build(ks.MultiWorkerMirroredStrategy())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.fit(**arguments, verbose=0, callbacks=[*callbacks, report])
    return {"figures": report.figures, "printed": printed.getvalue()}
