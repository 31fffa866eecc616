"""A job whose fits are interrupted, and go on; see `test_resumed.py`.

    keras-strategies launch ... -m tests.multi_process.resumed '{"directory":
    ...}'

Words of what it is told: directory; sources, trained one after the other, each
with checkpoints of its own; point, where they are interrupted (`POINTS`): the
last one by SIGKILL, those before it by an exception; parts, dicts of such
words, for several jobs in one; seed; model ("exact",
"elastic"); epochs; every (steps); slow_s (seconds a step).
"""

import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import time
import warnings

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.fit.callbacks import callback_states
from keras_strategies.variables.model_variables import (
    all_variables,
)

layers = keras.layers
ROWS, SIZE, EPOCHS = 77, 8, 4
STEPS = EPOCHS * -(-ROWS // SIZE)
POINTS = {
    # (Which hook or file, how many of them before.)
    "in an epoch": ("batch", 14),
    "at an epoch's last step": ("batch", 20),
    "in validation": ("validation", 4),
    "in an epoch's first step": ("batch", 11),
    "while arrays are written": (".orbax-checkpoint-tmp", 4),
    "before the manifest": ("manifest.json", 4),
}
HOOKS = ("batch", "validation")
_rng = np.random.default_rng(0)
X = _rng.normal(size=(ROWS, 6)).astype("float32")
Y = np.stack([X[:, 0] * 2 + 0.1 * X[:, 1], np.arange(ROWS)], 1)
Y = Y.astype("float32")

warnings.filterwarnings("ignore", ".shuffle=True. was passed")


class Interrupted(Exception):
    """As a crash of the user's own code."""


class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__(workers=2)

    def __len__(self):
        return -(-ROWS // SIZE)

    def __getitem__(self, index):
        rows = slice(index * SIZE, (index + 1) * SIZE)
        return X[rows], Y[rows]


def numpy_arrays():
    return {"x": X, "y": Y, "batch_size": SIZE}


def py_dataset():
    return {"x": Batches()}


def grain_dataset():
    import grain

    rows = grain.MapDataset.source([(X[i], Y[i]) for i in range(ROWS)])
    return {"x": rows.seed(3).shuffle().batch(SIZE)}


def tf_dataset():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    return {"x": dataset.shuffle(ROWS).batch(SIZE)}


SOURCES = {
    "numpy": numpy_arrays,
    "PyDataset": py_dataset,
    "grain": grain_dataset,
    "tf.data": tf_dataset,
}


class Once(keras.metrics.Metric):
    """How many rows were seen exactly once in this epoch."""

    def __init__(self):
        super().__init__(name="once")
        self.counts = self.add_weight(
            shape=(ROWS,), initializer="zeros", name="counts"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        seen = keras.ops.one_hot(keras.ops.cast(y_true[:, 1], "int32"), ROWS)
        if sample_weight is not None:
            seen = seen * keras.ops.reshape(sample_weight, (-1, 1))
        self.counts.assign_add(keras.ops.sum(seen, axis=0))

    def result(self):
        return keras.ops.sum(keras.ops.cast(self.counts == 1, "float32"))


def loss(y_true, y_pred):
    return keras.ops.mean((y_true[:, :1] - y_pred) ** 2, axis=-1)


def compiled(strategy, kind):
    """A model in the strategy's scope, its first weights the same."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = layers.Dense(16, activation="tanh")
        if kind == "exact":
            parts = [layers.BatchNormalization(), layers.Dropout(0.3, seed=3)]
            optimizer = keras.optimizers.Adam(1e-2)
        else:
            parts = [layers.BatchNormalization(synchronized=True)]
            optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
        model = keras.Sequential(
            [keras.Input((6,)), hidden, *parts, layers.Dense(1)]
        )
        model.compile(optimizer, loss, metrics=[Once()])
    return model


class Interrupting(keras.callbacks.Callback):
    """Interrupts where it is told to, counting as if it never was."""

    def __init__(self, point, is_killed, slow_s=0.0):
        super().__init__()
        self.kind, self.left = POINTS.get(point, ("", 0))
        self.is_killed, self.slow_s = is_killed, slow_s
        if point and self.kind not in HOOKS and not is_killed:
            # Files are the chief's, and an exception is to end all fits.
            several = jax.process_count() > 1
            point = "in an epoch" if several else point
            self.kind, self.left = POINTS.get(point, ("", 0))

    def reach(self, kind):
        if kind != self.kind:
            return
        self.left -= 1
        if self.left:
            return
        if self.is_killed and jax.process_index() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_killed:
            time.sleep(60)  # The chief is dead, and this one is ended.
        raise Interrupted

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.slow_s)
        self.reach("batch")

    def on_test_batch_end(self, batch, logs=None):
        self.reach("validation")

    def on_audit(self, event, args):
        """Before a file is renamed: Orbax's directory, or our manifest."""
        if event != "os.rename" or self.kind in ("", *HOOKS):
            return
        source, target = (os.fspath(path) for path in args[:2])
        is_it = (
            source.endswith(self.kind) or target.endswith(self.kind)
            if self.kind == "manifest.json"
            else self.kind in os.path.basename(source)
        )
        if is_it:
            self.reach(self.kind)


class Said(keras.callbacks.Callback):
    """Says every step to a file of this process, with the run's number."""

    def __init__(self, directory):
        super().__init__()
        self.path = directory / f"steps.{jax.process_index()}"
        self.count = 0

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]
        self.say("goes on")

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        self.say("step")

    def say(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what} {self.count} of {os.getpid()}\n")


def fit(told, name, is_last):
    """Trains with one source; returns what can be compared."""
    directory = pathlib.Path(told["directory"]) / name
    directory.mkdir(parents=True, exist_ok=True)
    kind = told.get("model", "exact")
    model = compiled(ks.MultiWorkerMirroredStrategy(), kind)
    # A new process draws others: none of them may count.
    seed = told["seed"]
    np.random.seed(seed)
    random.seed(seed)
    interrupting = Interrupting(
        told.get("point"), is_last, told.get("slow_s", 0.0)
    )
    sys.addaudithook(interrupting.on_audit)
    own = [
        keras.callbacks.EarlyStopping(patience=50, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(
            factor=0.5, patience=1, min_delta=9.0
        ),
        keras.callbacks.CSVLogger(directory / "log.csv"),
    ]
    kept = ks.callbacks.Checkpoint(
        directory / "kept", save_every_steps=told.get("every", 3)
    )
    history = model.fit(
        **SOURCES[name](),
        epochs=told.get("epochs", EPOCHS),
        validation_data=(X[:20], Y[:20]),
        callbacks=[*own, Said(directory), interrupting, kept],
        verbose=0,
    )
    variables = [np.asarray(v.value) for v in all_variables(model)]
    states = callback_states.collect_states(own)
    best = states["EarlyStopping"].pop("best_weights")
    return {
        "variables": [digest(value) for value in variables],
        "best": [digest(np.asarray(value)) for value in best],
        "callbacks": states,
        "history": history.history,
        "epochs": history.epoch,
        "log": (directory / "log.csv").read_text(),
    }


def digest(array):
    text = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(text + array.tobytes()).hexdigest()[:16]


def main(told):
    for part in told.get("parts", [{}]):
        train(told | part)


def train(told):
    *_, last = told["sources"]
    for name in told["sources"]:
        try:
            outcome = fit(told, name, name == last)
        except (Interrupted, OSError) as error:
            print(f"{name} was interrupted: {error!r}", flush=True)
            continue
        path = pathlib.Path(told["directory"]) / name / "outcome.json"
        if jax.process_index() == 0:
            path.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
