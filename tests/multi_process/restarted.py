"""A fit that `launch --max-restarts` starts again; run by test_restarts.py.

python -m tests.multi_process.restarted DIRECTORY EPOCHS KIND

KIND is "dropout" for a model with Dropout, or "plain" for one without. Process
0 appends each step to DIRECTORY/begun before it computes it, and to
DIRECTORY/steps afterwards, and saves the weights in DIRECTORY/weights.npy.
DIRECTORY/checkpoints also contains the report of the run.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import keras_strategies as ks

DIRECTORY, EPOCHS, KIND = (
    pathlib.Path(sys.argv[1]),
    int(sys.argv[2]),
    sys.argv[3],
)
CHECKPOINTS = DIRECTORY / "checkpoints"
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STEPS_PER_EPOCH, BATCH = 10, 12


class Recorder(keras.callbacks.Callback):
    """Records the steps, which last long enough to be killed in."""

    step = 0

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]

    def on_train_batch_begin(self, batch, logs=None):
        self.record("begun", self.step + 1)

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        self.record("steps", self.step)
        time.sleep(0.02)

    def record(self, name, step):
        if TASK == 0:
            with open(DIRECTORY / name, "a") as file:
                file.write(f"{step}\n")


def main():
    keras.utils.set_random_seed(3)
    strategy = ks.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(STEPS_PER_EPOCH * BATCH, 4))
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "relu"),
                keras.layers.Dropout(0.1 if KIND == "dropout" else 0.0),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    saved = ks.callbacks.Checkpoint(CHECKPOINTS, save_every_steps=7)
    report = ks.callbacks.RunReport(verbose=False)
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[saved, report, Recorder()],
    )
    if TASK == 0:
        weights = [w.ravel() for w in model.get_weights()]
        np.save(DIRECTORY / "weights.npy", np.concatenate(weights))


if __name__ == "__main__":
    main()
