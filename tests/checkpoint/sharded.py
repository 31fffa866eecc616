"""Training with divided variables that saves at every step, or is killed."""

import os
import shutil
import signal
import threading
from pathlib import Path

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import keras_strategies as ks
from keras_strategies.variables import model_variables
from tests.support.checkpoint.runs import Seen
from tests.support.strategies import make_strategy
from tests.support.waiting import wait_until

_random = np.random.default_rng(2)
X = _random.normal(size=(26, 8)).astype("float32")
Y = np.tanh(X[:, :4])


def built(name):
    """A compiled model of a strategy, with the same weights each time."""
    keras.utils.set_random_seed(1)
    strategy = (
        ks.MultiWorkerMirroredStrategy(
            variable_partitioner=ks.experimental.FullySharded(
                jax.device_count(), min_size=1
            )
        )
        if name == "job"
        else make_strategy(name)
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(24, "tanh"),
                keras.layers.Dense(24, "tanh"),
                keras.layers.Dense(4),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, epsilon=0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def train(name, directory, stop=None, epochs=3):
    """The losses and all values after training, resumed if there is one."""
    model = built(name)
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        verbose=0,
        callbacks=[
            Seen(stop),
            ks.callbacks.Checkpoint(directory, save_every_steps=3),
        ],
    )
    return history.history, values_of(model)


def values_of(model):
    return [np.asarray(v) for v in model_variables.all_variables(model)]


def add(model, number):
    """Adds a number to all values that are of its kind."""
    for variable in model_variables.all_variables(model):
        value = np.asarray(variable)
        variable.assign(value + np.asarray(number).astype(value.dtype))


def fill(model, number):
    """Sets all values to a number."""
    for variable in model_variables.all_variables(model):
        variable.assign(np.full(variable.shape, number, variable.dtype))
    return model


def killed_in_a_save(name, directory, last):
    """Saves steps 1 to `last`, and is killed while the last is written."""
    model, directory = built(name), Path(directory)
    checkpoint = ks.checkpoint.Checkpoint(model=model)
    with ks.checkpoint.CheckpointManager(checkpoint, directory) as manager:
        for step in range(1, last + 1):
            fill(model, step)
            if step == last:
                manager.wait()
                threading.Thread(target=_kill, args=[directory, last]).start()
            manager.save(step)
        manager.wait()


def _kill(directory, step):
    """Ends this process as soon as arrays of a step are written."""

    def are_written():
        return any(
            "ocdbt.process" in parent and files
            for path in directory.glob(f"{step}.*")
            for parent, _, files in os.walk(path)
        )

    wait_until(are_written, every_s=0.0001)
    os.kill(os.getpid(), signal.SIGKILL)


def refused(directory, names):
    """What a job says of checkpoints in which a shard's file is damaged."""
    model, directory = built("job"), Path(directory)
    checkpoint = ks.checkpoint.Checkpoint(model=model)
    whole = directory / "whole"
    with ks.checkpoint.CheckpointManager(checkpoint, whole) as manager:
        for step in (1, 2):
            fill(model, step)
            manager.save(step)
    told = {}
    for name in names:
        _in_chief(name, lambda name=name: _damage(directory, name))
        fill(model, 5)
        with ks.checkpoint.CheckpointManager(
            checkpoint, directory / name
        ) as manager:
            try:
                manager.restore(2)
                error = None
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            untouched = all((v == 5).all() for v in values_of(model))
            step = manager.restore_or_initialize()
            restored = all((v == 1).all() for v in values_of(model))
        told[name] = [error, untouched, step, restored]
    files = (whole / "2" / "state").glob("ocdbt.process_*/d/*")
    told["writers"] = sorted({file.parts[-3] for file in files})
    return told


def _in_chief(name, work):
    """Does something in the chief; the others wait until it is done."""
    if jax.process_index() == 0:
        work()
    multihost_utils.sync_global_devices(name)


def _damage(directory, name):
    """`missing-1`: a shard's file of process 1 is not there."""
    shutil.copytree(directory / "whole", directory / name)
    kind, process = name.split("-")
    step = directory / name / "2"
    file = sorted(step.glob(f"state/ocdbt.process_{process}/d/*"))[0]
    if kind == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
