"""Four fits that are slow for a known cause, and what their reports say.

    ./run bench report_causes

Prints the table of docs/performance.md.
"""

import tempfile
import time

import numpy as np

from keras_strategies.testing import run_processes

SHOWN = ("input", "program", "python", "save", "compile")
STEPS = 100


def build(width=16, vocabulary=None):
    import keras

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        if vocabulary:
            first = [
                keras.layers.Embedding(vocabulary, width),
                keras.layers.GlobalAveragePooling1D(),
            ]
        else:
            first = [keras.Input((width,))]
        layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([*first, *layers])
        model.compile("adam", "mse")
    return model


def rows(count, width=16):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, width)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def slow_input():
    """A generator that takes 20 ms a batch on process 1."""
    import jax

    def batches():
        for _ in range(STEPS):
            time.sleep(0.02 * jax.process_index())
            yield rows(32)

    return fit(build(), x=batches())


def new_shapes():
    """Token sequences that are longer in each epoch."""

    def batches():
        random = np.random.default_rng(0)
        for epoch in range(5):
            for _ in range(STEPS // 5):
                yield random.integers(0, 50, (32, 20 + epoch)), np.ones((32, 1))

    model = build(vocabulary=50)
    return fit(model, x=batches(), epochs=5, steps_per_epoch=STEPS // 5)


def saves():
    """A checkpoint after each step."""
    import keras_strategies as ks

    x, y = rows(32 * STEPS)
    with tempfile.TemporaryDirectory() as directory:
        callback = ks.callbacks.Checkpoint(directory, save_every_steps=1)
        return fit(build(), callback, x=x, y=y, batch_size=32)


def small_kernels():
    """Steps of a model with two small layers."""
    x, y = rows(32 * 20 * STEPS)
    return fit(build(), x=x, y=y, batch_size=32)


def fit(model, *callbacks, **arguments):
    import keras_strategies as ks

    report = ks.callbacks.RunReport(verbose=False)
    model.fit(**arguments, verbose=0, callbacks=[*callbacks, report])
    return report.figures


FITS = (
    ("a generator that is slow on 1 of 2 processes", "slow_input", 2),
    ("a new shape in each epoch", "new_shapes", 1),
    ("a save after each step", "saves", 1),
    ("small kernels", "small_kernels", 1),
)


def main():
    print(f"| fit | step | {' | '.join(SHOWN)} | sentence |")
    print("|---" * (len(SHOWN) + 3) + "|")
    for name, function, count in FITS:
        figures = run_processes(f"benchmarks.report_causes:{function}", count)
        figures = figures[0].value
        shares = (f"{100 * figures['shares'][one]:.0f} %" for one in SHOWN)
        step = f"{figures['step_ms']['median']:.2g} ms"
        cells = " | ".join([name, step, *shares, figures["advice"]])
        print(f"| {cells} |")


if __name__ == "__main__":
    main()
