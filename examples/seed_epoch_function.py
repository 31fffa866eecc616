"""A whole epoch as one function, as tf.distribute's own pages write it.

The loop is that of the `tf.distribute.Strategy` page, with its names changed;
the replica's function trains a linear model, and a library function in it asks
for the replica it runs on. With one CPU device only, four virtual ones are
used. Asserts that the weights are found, and that all rows were counted.

    python examples/seed_epoch_function.py
    python examples/seed_epoch_function.py --devices 3
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--devices", type=int, help="how many to use; all by default"
    )
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices or 4}",
    )
    return options


OPTIONS = parse()

import jax
import keras
import numpy as np

import keras_strategies as ks

EPOCHS = OPTIONS.epochs
BATCH_SIZE = 64
TRUE_WEIGHTS = np.array([[2.0], [-3.0], [0.5]], "float32")


def rows_of_all(count):
    """A library function: it knows of the other replicas, its caller not."""
    context = ks.get_replica_context()
    return context.all_reduce(ks.ReduceOp.SUM, count)


def main():
    my_strategy = ks.MirroredStrategy(jax.local_devices()[: OPTIONS.devices])
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype("float32")
    dataset = my_strategy.experimental_make_numpy_dataset(
        (x, x @ TRUE_WEIGHTS)
    ).batch(BATCH_SIZE)

    with my_strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        rows_seen = keras.Variable(0, dtype="int32", name="rows_seen")

        @ks.function
        def distribute_train_epoch(dataset):
            def replica_fn(input):
                x, y = input
                rows = rows_of_all(x.shape[0])
                rows_seen.assign_add(rows)

                def loss_fn():
                    error = keras.ops.square(model(x, training=True) - y)
                    return keras.ops.sum(error) / rows

                loss, grads = ks.value_and_grad(
                    loss_fn, model.trainable_variables
                )()
                optimizer.apply(grads, model.trainable_variables)
                return loss

            total_result = 0
            for x in dataset:
                per_replica_result = my_strategy.run(replica_fn, args=(x,))
                total_result += my_strategy.reduce(
                    ks.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
        for epoch in range(EPOCHS):
            train_result = distribute_train_epoch(dist_dataset)
            print(f"epoch {epoch + 1:2}  loss {float(train_result):.6f}")

    error = np.abs(model.get_weights()[0] - TRUE_WEIGHTS).max()
    replicas = my_strategy.num_replicas_in_sync
    print(
        f"weights found to {error:.1e} on {replicas} replicas, "
        f"{int(rows_seen.value)} rows seen"
    )
    assert error < 1e-3, error
    assert int(rows_seen.value) == 1000 * EPOCHS, rows_seen


if __name__ == "__main__":
    main()
