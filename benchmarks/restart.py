"""Seconds from the start of a job to the end of its first train step.

Cold, with an empty cache of compiled programs, and restarted, with the programs
of the run before. Medians of several turns, on one and on two processes.

    ./run bench restart
    ./run bench restart --turns 1 --models cnn
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time

TIME_LIMIT_S = 600


def cnn():
    """A small convolutional model, with BatchNormalization and Dropout."""
    import keras
    from keras import layers

    x = inputs = keras.Input((8, 8, 1))
    for filters in (32, 64, 64):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.1)(layers.ReLU()(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def decoder():
    """A causal transformer of four blocks."""
    import keras
    from keras import layers

    tokens = keras.Input((48,), dtype="int32")
    x = layers.Embedding(80, 64)(tokens)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, 16)(y, y, use_causal_mask=True)
        y = layers.Dense(256, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(64)(y)
    return keras.Model(tokens, layers.Dense(80)(x))


MODELS = {"cnn": cnn, "decoder": decoder}


def train(name, directory):
    """Trains a step; prints the time when each part of the run was over."""
    import keras
    import numpy as np

    import keras_strategies as ks  # First: chooses Keras's backend.

    print(f"at imports {time.time()}", flush=True)
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = MODELS[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    print(f"at model {time.time()}", flush=True)
    draw = np.random.default_rng(0)
    if name == "cnn":
        x, y = draw.normal(size=(64, 8, 8, 1)), draw.integers(0, 10, 64)
    else:
        x = y = draw.integers(0, 80, (64, 48))

    class Report(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # Waits for the step.
            if batch == 0:
                print(f"at step {time.time()}", flush=True)

    saved = ks.callbacks.Checkpoint(directory)
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[Report(), saved])


def measure(name, processes, cache):
    """Returns the seconds of imports, model and first step of one job."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.time()
        words = [sys.executable, "-m", "keras_strategies.cli", "launch"]
        words += ["--processes", str(processes), "--max-restarts", "1"]
        ended = subprocess.run(
            [*words, __file__, "--train", name, "--directory", directory],
            env={
                **{k: v for k, v in os.environ.items() if k[:4] != "JAX_"},
                "XDG_CACHE_HOME": cache,
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIME_LIMIT_S,
            check=True,
        )
    times = [start]
    for part in ("imports", "model", "step"):
        (line,) = (
            line
            for line in ended.stdout.splitlines()
            if line.startswith(f"at {part}")
        )
        times.append(float(line.split()[-1]))
    return [after - before for before, after in itertools.pairwise(times)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.directory)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Seconds to the first step (medians, {options.turns})")
    for column in ("model", "processes", "", "imports", "model", "step", "all"):
        table.add_column(column)
    for name in options.models:
        for processes in options.processes:
            rows = {"cold": [], "restarted": []}
            for _ in range(options.turns):
                with tempfile.TemporaryDirectory() as cache:
                    for turns in rows.values():
                        turns.append(measure(name, processes, cache))
            totals = {}
            for kind, turns in rows.items():
                parts = map(statistics.median, zip(*turns, strict=True))
                totals[kind] = statistics.median(map(sum, turns))
                shown = [f"{s:.1f}" for s in (*parts, totals[kind])]
                table.add_row(name, str(processes), kind, *shown)
            ratio = totals["restarted"] / totals["cold"]
            table.add_row(
                name, str(processes), "ratio", "", "", "", f"{ratio:.2f}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
