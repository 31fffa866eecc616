"""Trains on handwritten digits with a loop of one's own, on all devices.

`run` runs the step once on every replica, the optimizer sums the gradients,
metrics add up what the replicas add, and `reduce` makes one loss of theirs.
A `CheckpointManager` saves a checkpoint of every epoch, and a run that finds
some resumes from the newest, on any number of devices. With one CPU device
only, four virtual ones are used. Asserts that the test accuracy is at least
0.93.

    python examples/custom_loop.py
    python examples/custom_loop.py --devices 2 --checkpoints /tmp/digits
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--devices", type=int, help="how many to use; all by default"
    )
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--checkpoints", help="the directory to keep them in; none by default"
    )
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices or 4}",
    )
    return options


OPTIONS = parse()

import contextlib

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_strategies as ks

BATCH_SIZE = 100


def load():
    digits = load_digits()
    x = (digits.data / 16.0).astype("float32")
    y = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def main():
    strategy = ks.MirroredStrategy(jax.local_devices()[: OPTIONS.devices])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(3e-3)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def train_step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            # A replica's part of the mean over the global batch.
            return ks.compute_average_loss(loss_of(y, logits))

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    def test_step(x, y):
        accuracy.update_state(y, model(x))

    train_data, test_data = (
        strategy.experimental_distribute_dataset(
            strategy.experimental_make_numpy_dataset(arrays).batch(BATCH_SIZE)
        )
        for arrays in load()
    )
    with contextlib.ExitStack() as stack:
        manager = None
        done = 0
        if OPTIONS.checkpoints:
            checkpoint = ks.checkpoint.Checkpoint(
                model=model, optimizer=optimizer
            )
            manager = stack.enter_context(
                ks.checkpoint.CheckpointManager(checkpoint, OPTIONS.checkpoints)
            )
            done = manager.restore_or_initialize() or 0
            if done:
                print(f"resumes after epoch {done} of {manager.directory}")
        for epoch in range(done + 1, OPTIONS.epochs + 1):
            accuracy.reset_state()
            total, steps = 0.0, 0
            for batch in train_data:
                losses = strategy.run(train_step, args=batch)
                total += strategy.reduce("sum", losses, axis=None)
                steps += 1
            if manager is not None:
                manager.save(epoch)
            print(
                f"epoch {epoch:2}  loss {float(total) / steps:.3f}  "
                f"accuracy {float(accuracy.result()):.3f}"
            )
    accuracy.reset_state()
    for batch in test_data:
        strategy.run(test_step, args=batch)
    result = float(accuracy.result())
    replicas = strategy.num_replicas_in_sync
    print(f"test accuracy {result:.3f} on {replicas} replicas")
    assert result >= 0.93, result


if __name__ == "__main__":
    main()
