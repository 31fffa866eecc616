"""Callbacks on several processes; see `run_processes`."""

import contextlib
import logging
import os
import pathlib

import jax
import keras

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.multi_process.custom_loops import SIZE, lists
from tests.multi_process.scenarios import build, data


class Stop(keras.callbacks.Callback):
    """Ends a fit as a crash would."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


class Predicting(keras.callbacks.ModelCheckpoint):
    """A user's own: what it calls needs all processes."""

    def __init__(self, filepath, x):
        super().__init__(filepath)
        self._x = x

    def on_epoch_end(self, epoch, logs=None):
        self.rows = len(self.model.predict(self._x, verbose=0))
        super().on_epoch_end(epoch, logs)


def files(directory):
    """Checkpoints, logs, and a backup that a second fit goes on from."""
    strategy = ks.MultiWorkerMirroredStrategy()
    directory = pathlib.Path(directory)
    x, y = data(21)
    own = directory / f"{jax.process_index()}.keras"
    callbacks = [
        keras.callbacks.ModelCheckpoint(own),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        keras.callbacks.EarlyStopping(monitor="loss", patience=50),
        Predicting(directory / f"own_{jax.process_index()}.keras", x),
    ]
    given = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
    whole = build(strategy)
    whole.build((None, 3))
    history = whole.fit(x, y, epochs=4, callbacks=callbacks, **given).history
    backup = keras.callbacks.BackupAndRestore(
        directory / "backup", delete_checkpoint=False
    )
    model = build(strategy)
    model.build((None, 3))
    with contextlib.suppress(InterruptedError):
        model.fit(x, y, epochs=4, callbacks=[backup, Stop()], **given)
    again = build(strategy)
    again.build((None, 3))
    rest = again.fit(x, y, epochs=4, callbacks=[backup], **given).history
    assert_replicated(again)
    assert type(backup) is keras.callbacks.BackupAndRestore
    # Of a directory that not all processes see.
    lonely = keras.callbacks.BackupAndRestore(
        directory / str(jax.process_index())
    )
    if jax.process_index() == 0:
        (directory / "0").mkdir()
        again.save_weights(directory / "0" / "latest.weights.h5")
    try:
        again.fit(x, y, callbacks=[lonely], **given)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "history": history,
        "rest": rest,
        "weights": [lists(w) for w in whole.get_weights()],
        "again": [lists(w) for w in again.get_weights()],
        "refused": refused,
        "rows": callbacks[-1].rows,
    }


class Lines(logging.Handler):
    """Counts what is logged."""

    num_lines = 0

    def emit(self, record):
        self.num_lines += 1


def scalars(directory):
    """Event files of a fit with validation, and a line every three steps."""
    strategy = ks.MultiWorkerMirroredStrategy()
    x, y = data(21)
    lines, log = (
        Lines(),
        logging.getLogger("keras_strategies.callbacks.scalars"),
    )
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    model = build(strategy)
    rates = keras.optimizers.schedules.PiecewiseConstantDecay(
        [6], [0.25, 0.125]
    )
    with strategy.scope():
        model.compile(keras.optimizers.SGD(rates), "mse")
    callback = ks.callbacks.Scalars(directory, every_n_steps=3)
    history = model.fit(
        x,
        y,
        batch_size=6,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[callback],
    )
    return {
        "loss": history.history["loss"],
        "state": callback.get_state(),
        "pid": os.getpid(),
        "lines": lines.num_lines,
    }


def own_checkpoints(directory, index):
    """A strategy of one process of a job keeps what it trains."""
    if jax.process_index() != index:
        return None
    strategy = ks.OneDeviceStrategy(jax.local_devices()[0])
    model = build(strategy)
    x, y = data(21)
    best = keras.callbacks.EarlyStopping(
        monitor="loss", restore_best_weights=True
    )
    given = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
    try:
        model.fit(
            x, y, callbacks=[ks.callbacks.Checkpoint(directory), best], **given
        )
    except ValueError as error:
        return str(error)
    again = build(strategy)
    again.build((None, 3))
    best.best_weights = None
    again.fit(
        x, y, callbacks=[ks.callbacks.Checkpoint(directory), best], **given
    )
    found = (model.get_weights(), again.get_weights(), best.best_weights)
    return [[lists(weight) for weight in weights] for weights in found]
