"""Whole-fit time per step against what Keras, TensorFlow and JAX offer.

Every peer of a session (a workload and a number of steps per execution) is a
fresh process on virtual CPU devices, and they take turns, one whole fit each
(turns.py). Medians of the turns are compared.

    ./run bench fit
    ./run bench fit --quick
    ./run bench fit --devices 4 --workloads small_mlp --repeats 5
    ./run bench fit --workloads resnet20 --spe 1 --repeats 3

Peers: `ours` (MirroredStrategy), `dataparallel` (keras.distribution.
DataParallel), `tf` (tf.distribute.MirroredStrategy, Keras on TensorFlow; one
step an execution, since more fail there with Keras 3.15 and TensorFlow 2.21),
`raw` (a hand-written loop over a mapped step), `one` (Keras on one device).
"""

import argparse
import json
import os
import statistics

import turns

PEERS = ("ours", "dataparallel", "tf", "raw", "one")
WORKLOADS = ("small_mlp", "wide_mlp", "cnn", "transformer")
# As people train it: half a second a step on 2 cores.
LONG_WORKLOADS = ("resnet20",)
# Workload: rows of a batch, steps of an epoch, epochs of a fit.
SIZES = {
    "small_mlp": (64, 400, 3),
    "wide_mlp": (256, 40, 1),
    "cnn": (64, 40, 3),
    "transformer": (32, 40, 3),
    "resnet20": (128, 10, 1),
}
SHAPES = {
    "cnn": (16, 16, 3),
    "transformer": (32,),
    "resnet20": (32, 32, 3),
}


def data(workload, steps):
    import numpy as np

    random = np.random.default_rng(0)
    rows = SIZES[workload][0] * steps
    shape = SHAPES.get(workload, (32,))
    if workload == "transformer":
        x = random.integers(0, 64, (rows, *shape)).astype("int32")
        return x, random.integers(0, 64, (rows, *shape)).astype("int32")
    x = random.normal(size=(rows, *shape)).astype("float32")
    return x, random.integers(0, 10, rows).astype("int32")


def resnet20():
    """ResNet-20 for images of CIFAR-10: He et al. 2016, section 4.2.

    With its projections (option B) where the shape changes.
    """
    import keras
    from keras import layers

    def convolved(value, filters, size, strides=1):
        value = layers.Conv2D(
            filters, size, strides=strides, padding="same", use_bias=False
        )(value)
        return layers.BatchNormalization()(value)

    inputs = keras.Input(SHAPES["resnet20"])
    value = layers.ReLU()(convolved(inputs, 16, 3))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            hidden = layers.ReLU()(convolved(value, filters, 3, strides))
            hidden = convolved(hidden, filters, 3)
            if strides == 2:
                value = convolved(value, filters, 1, strides)
            value = layers.ReLU()(value + hidden)
    value = layers.GlobalAveragePooling2D()(value)
    return keras.Model(inputs, layers.Dense(10)(value))


def build(workload, steps_per_execution):
    import keras
    from keras import layers

    if workload == "resnet20":
        model = resnet20()
    elif workload == "cnn":
        stack = [keras.Input((16, 16, 3))]
        for filters in (16, 32):
            stack += [
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        stack += [layers.Flatten(), layers.Dense(10)]
        model = keras.Sequential(stack)
    elif workload == "transformer":
        inputs = keras.Input((32,), dtype="int32")
        value = layers.Embedding(64, 64)(inputs)
        for _ in range(2):
            attended = layers.MultiHeadAttention(4, 16)(
                value, value, use_causal_mask=True
            )
            value = layers.LayerNormalization()(value + attended)
            hidden = layers.Dense(128, activation="relu")(value)
            value = layers.LayerNormalization()(
                value + layers.Dense(64)(hidden)
            )
        model = keras.Model(inputs, layers.Dense(64)(value))
    else:
        width, depth = (64, 3) if workload == "small_mlp" else (512, 6)
        model = keras.Sequential(
            [keras.Input((32,))]
            + [layers.Dense(width, activation="relu") for _ in range(depth)]
            + [layers.Dense(10)]
        )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def fitted(options):
    """A function that trains for some epochs: one fit."""
    peer = options.peer
    x, y = data(options.workload, options.steps)
    arguments = {
        "batch_size": SIZES[options.workload][0],
        "epochs": options.epochs,
        "verbose": 0,
        "shuffle": False,
    }
    if peer == "ours":
        import keras_strategies as ks

        with ks.MirroredStrategy().scope():
            model = build(options.workload, options.spe)
    elif peer == "dataparallel":
        import keras

        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices)
        )
        model = build(options.workload, options.spe)
    elif peer == "tf":
        return fitted_on_tf(x, y, arguments, options)
    elif peer == "raw":
        return raw_loop(x, y, options)
    else:
        model = build(options.workload, options.spe)
    return lambda: model.fit(x, y, **arguments)


def fitted_on_tf(x, y, arguments, options):
    with tf_strategy(options.devices).scope():
        model = build(options.workload, options.spe)
    return lambda: model.fit(x, y, **arguments)


def tf_strategy(devices):
    """tf's MirroredStrategy on that many virtual CPU devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * devices
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)])


def raw_loop(x, y, options):
    """What one would write by hand: a mapped step, one flat all-reduce."""
    import jax
    import numpy as np
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model = build(options.workload, 1)
    rows, steps, count = len(x) // options.steps, options.steps, options.spe
    model._symbolic_build(data_batch=(x[:rows], y[:rows]))
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    apply = model.optimizer.stateless_apply

    def reduced_apply(slots, grads, weights):
        flat, restore = ravel_pytree(grads)
        flat = jax.lax.pmean(flat, "replica")
        return apply(slots, restore(flat), weights)

    model.optimizer.stateless_apply = reduced_apply

    def step(state, batch):
        _, new = model.train_step(state, batch)
        weights, other, slots, metrics = new
        other = [
            jax.lax.pmean(v, "replica")
            if jax.numpy.issubdtype(v.dtype, jax.numpy.floating)
            else v
            for v in other
        ]
        old, restore = ravel_pytree(state[3])
        added = jax.lax.psum(ravel_pytree(metrics)[0] - old, "replica")
        metrics = restore(old + added)
        with_metrics = list(zip(model.metrics_variables, metrics, strict=True))
        import keras

        with keras.StatelessScope(state_mapping=with_metrics):
            logs = model.get_metrics_result()
        return (weights, other, slots, metrics), logs

    def many(state, batches):
        state = tuple(map(list, state))
        state, logs = jax.lax.scan(step, state, batches)
        return state, jax.tree.map(lambda a: a[-1], logs)

    spec = (
        PartitionSpec(None, "replica")
        if count > 1
        else PartitionSpec("replica")
    )
    mapped = jax.jit(
        jax.shard_map(
            many if count > 1 else step,
            mesh=mesh,
            in_specs=(PartitionSpec(), spec),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, spec)
    state = jax.device_put(
        tuple([np.array(v.value) for v in group] for group in groups), whole
    )

    def fit():
        nonlocal state
        starts = list(range(0, steps, count))
        for start in starts * options.epochs:
            part = slice(start * rows, (start + count) * rows)
            batch = x[part], y[part]
            if count > 1:
                batch = tuple(
                    a.reshape(count, rows, *a.shape[1:]) for a in batch
                )
            state, logs = mapped(state, jax.device_put(batch, split))
            jax.block_until_ready(logs)

    return fit


def start(peer, workload, spe, options, log):
    """Starts one peer in a fresh process, which warms up."""
    _, steps, epochs = SIZES[workload]
    if peer == "tf":
        spe = 1
    # TensorFlow takes ten times as long: one epoch a fit is enough.
    epochs = 1 if peer == "tf" else epochs
    if options.devices > (os.cpu_count() or 1):
        # Shorter fits: see `turns.session`.
        steps, epochs = max(steps // 4, 20), 1
    arguments = {
        "--peer": peer,
        "--workload": workload,
        "--spe-one": spe,
        "--devices": options.devices,
        "--steps": steps,
        "--epochs": epochs,
    }
    return turns.start(
        [str(part) for item in arguments.items() for part in item],
        on_tensorflow=peer == "tf",
        devices=1 if peer == "one" else options.devices,
        log=log,
    )


def session(workload, spe, peers, options):
    """Milliseconds a step of each peer's turns, in one session."""
    told = turns.session(
        peers,
        lambda peer, log: start(peer, workload, spe, options, log),
        options.repeats,
    )
    return {peer: [t["ms"] for t in each] for peer, each in told.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS + LONG_WORKLOADS,
        default=list(WORKLOADS),
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spe", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="the small MLP alone"
    )
    for hidden in ("--peer", "--workload"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--steps", "--epochs", "--spe-one"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        options.spe = options.spe_one
        turns.serve(fitted(options), options.epochs * options.steps)
        return
    if options.quick:
        options.workloads = ["small_mlp"]
    report(options)


def report(options):
    """Measures all, prints a table of medians and ratios."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    cells = [
        (workload, spe, peer)
        for workload in options.workloads
        for spe in options.spe
        for peer in options.peers
    ]
    sessions = list(dict.fromkeys((w, s) for w, s, _ in cells))
    samples = {}
    for workload, spe in track(
        sessions, "measuring", console=Console(stderr=True)
    ):
        known = samples.get((workload, options.spe[0], "tf"))
        peers = [p for p in options.peers if p != "tf" or known is None]
        measured = session(workload, spe, peers, options)
        if known is not None:
            measured["tf"] = known
        samples |= {(workload, spe, peer): t for peer, t in measured.items()}
    medians = {cell: statistics.median(s) for cell, s in samples.items()}
    cells = [cell for cell in cells if cell in samples]
    table = Table(
        title=f"fit on {options.devices} virtual CPU devices, ms a step "
        f"(ours / peer), medians of {options.repeats}"
    )
    table.add_column("workload")
    table.add_column("steps per execution", justify="right")
    for peer in options.peers:
        table.add_column(peer, justify="right")
    for workload in options.workloads:
        for spe in options.spe:
            row = [workload, str(spe)]
            for peer in options.peers:
                ms = medians.get((workload, spe, peer))
                if ms is None:
                    row.append("aborted")
                    continue
                text = f"{ms:.2f}"
                if peer != "ours" and "ours" in options.peers:
                    text += f" ({medians[workload, spe, 'ours'] / ms:.2f}x)"
                row.append(text)
            table.add_row(*row)
    Console(width=110).print(table)
    if options.json:
        records = [
            {"workload": w, "spe": s, "peer": p, "ms": samples[w, s, p]}
            for w, s, p in cells
        ]
        with open(options.json, "w") as file:
            json.dump({"devices": options.devices, "runs": records}, file)


if __name__ == "__main__":
    main()
