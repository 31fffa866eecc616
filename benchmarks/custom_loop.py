"""Time per step of a loop of one's own: `run` and `reduce` against its peers.

A small MLP with Adam and an accuracy, 64 rows a batch. Every peer is a fresh
process on virtual CPU devices, and they take turns (turns.py); medians of the
turns are compared.

    ./run bench custom_loop
    ./run bench custom_loop --devices 4 --repeats 5

Peers: `ours` (`run` and `reduce` on a distributed dataset), `raw` (a
hand-written loop over a jitted `shard_map` that does the same), `tf`
(tf.distribute.MirroredStrategy, the step in a tf.function).
"""

import argparse
import statistics

import turns

PEERS = ("ours", "raw", "tf")
ROWS = 64
STEPS = 1000


def data():
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * STEPS, 32)).astype("float32")
    return x, random.integers(0, 10, len(x)).astype("int32")


def build():
    import keras

    model = keras.Sequential(
        [keras.Input((32,))]
        + [keras.layers.Dense(64, activation="relu") for _ in range(3)]
        + [keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )
    return model, optimizer, accuracy, loss_of


def ours():
    import keras_strategies as ks

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model, optimizer, accuracy, loss_of = build()

    def step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return ks.compute_average_loss(
                loss_of(y, logits), global_batch_size=ROWS
            )

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset(data()).batch(ROWS)
    )

    def epoch():
        total = 0.0
        for batch in dataset:
            losses = strategy.run(step, args=batch)
            total += strategy.reduce("sum", losses, axis=None)
        return float(total)

    return epoch, lambda: {"compiled": strategy._runner.num_programs}


def raw():
    import jax
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model, optimizer, accuracy, loss_of = build()
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        accuracy.variables,
    )

    def step(state, x, y):
        weights, others, slots, sums = state

        def loss_fn(weights):
            logits, _ = model.stateless_call(weights, others, x, training=True)
            loss = jax.numpy.sum(loss_of(y, logits)) / ROWS
            return loss, accuracy.stateless_update_state(sums, y, logits)

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        added = [n - s for n, s in zip(new, sums, strict=True)]
        flat, restore = ravel_pytree((grads, added, loss))
        grads, added, loss = restore(jax.lax.psum(flat, "replica"))
        sums = [s + a for s, a in zip(sums, added, strict=True)]
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return (weights, others, slots, sums), loss

    split = PartitionSpec("replica")
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PartitionSpec(), split, split),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    state = jax.device_put(
        tuple([np.array(v.value) for v in group] for group in groups),
        NamedSharding(mesh, PartitionSpec()),
    )
    x, y = data()

    def epoch():
        nonlocal state
        total = 0.0
        for start in range(0, len(x), ROWS):
            part = slice(start, start + ROWS)
            batch = jax.device_put(
                (x[part], y[part]), NamedSharding(mesh, split)
            )
            state, loss = mapped(state, *batch)
            total += loss
            # More virtual devices than free cores: never two programs at once.
            jax.block_until_ready(total)
        return float(total)

    return epoch, lambda: {"compiled": mapped._cache_size()}


def tf(devices):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(devices)]
    )
    with strategy.scope():
        model, optimizer, accuracy, loss_of = build()

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            loss = tf.reduce_sum(loss_of(y, logits)) / ROWS
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def distributed_step(batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce("sum", losses, axis=None)

    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data()).batch(ROWS)
    )

    def epoch():
        total = 0.0
        for batch in dataset:
            total += distributed_step(batch)
        return float(total)

    return epoch, lambda: {
        "compiled": distributed_step.experimental_get_tracing_count()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        make = {"ours": ours, "raw": raw, "tf": lambda: tf(options.devices)}
        epoch, facts = make[options.peer]()
        turns.serve(epoch, STEPS, facts)
        return
    report(options)


def report(options):
    """Measures all, prints a table of medians and ratios."""
    from rich.console import Console
    from rich.table import Table

    def start(peer, log):
        return turns.start(
            ["--peer", peer, "--devices", str(options.devices)],
            on_tensorflow=peer == "tf",
            devices=options.devices,
            log=log,
        )

    told = turns.session(options.peers, start, options.repeats)
    medians = {
        peer: statistics.median(t["ms"] for t in each)
        for peer, each in told.items()
    }
    table = Table(
        title=f"a loop of {STEPS} steps on {options.devices} virtual CPU "
        f"devices, medians of {options.repeats}"
    )
    for column in ("peer", "ms a step", "ours / peer", "programs compiled"):
        table.add_column(
            column, justify="left" if column == "peer" else "right"
        )
    for peer, ms in medians.items():
        ratio = f"{medians['ours'] / ms:.2f}x" if "ours" in medians else ""
        table.add_row(peer, f"{ms:.3f}", ratio, str(told[peer][-1]["compiled"]))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
