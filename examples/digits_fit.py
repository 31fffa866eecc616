"""Trains a CNN on handwritten digits, on all devices of this machine.

With one CPU device only, four virtual ones are used. Asserts that the test
accuracy is at least 0.95, and that a run on all devices has the weights of a
run on one.

    ./run demo
    python examples/digits_fit.py --devices 2
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--devices", type=int, help="how many to use; all by default"
    )
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices or 4}",
    )
    return options


OPTIONS = parse()

import time

import jax
import keras
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import keras_strategies as ks


def load():
    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype("float32")
    y = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def cnn(synchronized=False, dropout=0.25):
    """A small CNN; every initial weight comes from a seed."""
    layers = keras.layers
    seeds = iter(range(1, 100))

    def conv(filters, strides=1):
        return [
            layers.Conv2D(
                filters,
                3,
                strides=strides,
                padding="same",
                use_bias=False,
                kernel_initializer=keras.initializers.HeNormal(next(seeds)),
            ),
            layers.BatchNormalization(momentum=0.9, synchronized=synchronized),
            layers.ReLU(),
        ]

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), *conv(16), *conv(32, 2), layers.Flatten()]
    )
    if dropout:
        model.add(layers.Dropout(dropout, seed=next(seeds)))
    model.add(
        layers.Dense(
            10, kernel_initializer=keras.initializers.GlorotUniform(next(seeds))
        )
    )
    return model


def compile_(model, optimizer):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(devices, train_data, test_data):
    """The four lines that distribute a model; returns accuracy and time."""
    strategy = ks.MirroredStrategy(devices)
    with strategy.scope():
        model = compile_(cnn(), "adam")
    start = time.perf_counter()
    model.fit(*train_data, batch_size=64, epochs=OPTIONS.epochs, verbose=2)
    seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(*test_data, verbose=0)
    strategy.describe(model)
    return strategy, accuracy, seconds


def largest_difference(devices, train_data):
    """max |dw| between all devices and one, after 3 epochs.

    Layers that are defined per replica (Dropout, BatchNormalization without
    `synchronized`) would make two different models of this.
    """
    weights = []
    for strategy in (
        ks.MirroredStrategy(devices),
        ks.OneDeviceStrategy(devices[0]),
    ):
        with strategy.scope():
            model = compile_(
                cnn(synchronized=True, dropout=0.0), keras.optimizers.SGD(0.05)
            )
        # By default, GPUs and TPUs round float32 in products.
        with jax.default_matmul_precision("highest"):
            model.fit(
                *train_data, batch_size=100, epochs=3, shuffle=False, verbose=0
            )
        weights.append(model.get_weights())
    return max(
        float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)
    )


def main():
    devices = jax.local_devices()[: OPTIONS.devices]
    train_data, test_data = load()
    strategy, accuracy, seconds = train(devices, train_data, test_data)
    difference = largest_difference(devices, train_data)
    tolerance = 1e-4
    table = Table(title="Digits on all devices", show_header=False)
    table.add_row("replicas", str(strategy.num_replicas_in_sync))
    table.add_row("devices", ", ".join(str(d) for d in devices[:8]))
    table.add_row("training", f"{seconds:.1f} s, {OPTIONS.epochs} epochs")
    table.add_row("test accuracy", f"{accuracy:.3f}")
    table.add_row(
        "weights, all devices - one device",
        f"max |dw| = {difference:.1e} (tolerance {tolerance:.0e})",
    )
    Console().print(table)
    assert accuracy >= 0.95, f"test accuracy {accuracy:.3f} is below 0.95"
    assert difference <= tolerance, f"weights differ by {difference:.1e}"
    Console().print("The weights equal a one-device run's.")
    Console().print(
        "Next: put the scope into a script of yours, as README.md shows; "
        "`keras-strategies migrate train.py` ports one for tf.distribute; "
        "examples/tour.ipynb shows the rest.",
        markup=False,
    )


if __name__ == "__main__":
    main()
