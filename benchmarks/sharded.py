"""Divided variables against peers: time a step and bytes a device.

    ./run bench sharded
    ./run bench sharded --devices 4 --models mlp --repeats 5
    ./run bench sharded --quick
    ./run bench sharded --tpu --help    # large decoders: sharded_tpu.py

Each peer is a process of its own on virtual CPU devices, and they take turns
(turns.py). Compared are medians of the ratios of neighboring turns.

Peers: `ours` (FullySharded), `replicated` (the same strategy without it),
`modelparallel` (keras.distribution.ModelParallel with the same weights divided
over the devices that share the batch), `raw` (a mapped step with gathers and
scatters by hand, and an optimizer on shards).
"""

import argparse
import statistics
import sys

import turns

PEERS = ("ours", "replicated", "modelparallel", "raw")
MODELS = ("mlp", "wide", "decoder")
# Rows of a batch, steps of an epoch.
SIZES = {"mlp": (128, 30), "wide": (128, 15), "decoder": (32, 20)}
MIN_SIZE = 2**10


def data(name, steps):
    import numpy as np

    random = np.random.default_rng(0)
    rows = SIZES[name][0] * steps
    if name == "decoder":
        x = random.integers(0, 256, (rows, 32)).astype("int32")
        return x, random.integers(0, 256, (rows, 32)).astype("int32")
    x = random.normal(size=(rows, 64)).astype("float32")
    return x, random.integers(0, 16, rows).astype("int32")


def build(name):
    import keras
    from keras import layers

    if name == "decoder":
        inputs = keras.Input((32,), dtype="int32")
        value = layers.Embedding(256, 128)(inputs)
        for _ in range(2):
            attended = layers.GroupQueryAttention(32, 4, 4)(
                value, value, use_causal_mask=True
            )
            value = layers.LayerNormalization()(value + attended)
            hidden = layers.Dense(512, activation="gelu")(value)
            value = layers.LayerNormalization()(
                value + layers.Dense(128)(hidden)
            )
        model = keras.Model(inputs, layers.Dense(256)(value))
    else:
        width, depth = (256, 6) if name == "mlp" else (1024, 4)
        stack = [layers.Dense(width, activation="tanh") for _ in range(depth)]
        model = keras.Sequential([keras.Input((64,)), *stack, layers.Dense(16)])
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def find_dim(shape, count):
    """The dimension that `FullySharded` divides, or None."""
    size = 1
    for side in shape:
        size *= side
    fits = [d for d, side in enumerate(shape) if side % count == 0]
    return fits[0] if fits and size >= MIN_SIZE else None


def fitted(options):
    """A function that trains for an epoch."""
    import keras

    x, y = data(options.model, options.steps)
    if options.peer == "raw":
        return raw_loop(x, y, options)
    if options.peer == "modelparallel":
        import jax

        count = len(jax.devices())
        mesh = keras.distribution.DeviceMesh(
            (count,), ["batch"], keras.distribution.list_devices()
        )
        layout = keras.distribution.LayoutMap(mesh)
        for variable in build(options.model).trainable_variables:
            dim = find_dim(variable.shape, count)
            axes = [None] * len(variable.shape)
            if dim is not None:
                axes[dim] = "batch"
                layout[variable.path] = tuple(axes)
        keras.backend.clear_session()
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=layout, batch_dim_name="batch"
            )
        )
        model = build(options.model)
    else:
        import keras_strategies as ks

        partitioner = ks.experimental.FullySharded(min_size=MIN_SIZE)
        strategy = ks.MirroredStrategy(
            variable_partitioner=(
                partitioner if options.peer == "ours" else None
            )
        )
        with strategy.scope():
            model = build(options.model)
    rows = SIZES[options.model][0]
    return lambda: model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)


def raw_loop(x, y, options):
    """What one would write by hand: gathers, scatters, Adam on shards."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    model, rows = build(options.model), SIZES[options.model][0]
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    count = mesh.size
    dims = [find_dim(v.shape, count) for v in model.trainable_variables]
    specs = [
        PartitionSpec()
        if dim is None
        else PartitionSpec(*[None] * dim, "replica")
        for dim in dims
    ]

    def gathered(shards):
        return [
            shard
            if dim is None
            else jax.lax.all_gather(shard, "replica", axis=dim, tiled=True)
            for shard, dim in zip(shards, dims, strict=True)
        ]

    def step(state, x, y):
        shards, first, second, number = state
        rest = [v.value for v in model.non_trainable_variables]

        def loss(shards):
            outputs, _ = model.stateless_call(gathered(shards), rest, x)
            return model.loss(y, outputs)

        value, grads = jax.value_and_grad(loss)(shards)
        grads = [
            (jax.lax.psum(g, "replica") if dim is None else g) / count
            for g, dim in zip(grads, dims, strict=True)
        ]
        number = number + 1
        new = []
        for w, m, v, g in zip(shards, first, second, grads, strict=True):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            scale = jnp.sqrt(1 - 0.999**number) / (1 - 0.9**number)
            new.append((w - 1e-3 * scale * m / (jnp.sqrt(v) + 1e-7), m, v))
        shards, first, second = map(list, zip(*new, strict=True))
        value = jax.lax.pmean(value, "replica")
        return (shards, first, second, number), value

    state_specs = (specs, specs, specs, PartitionSpec())
    split = PartitionSpec("replica")
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(state_specs, split, split),
            out_specs=(state_specs, PartitionSpec()),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    places = [NamedSharding(mesh, spec) for spec in specs]
    weights = [np.array(v.value) for v in model.trainable_variables]
    zeros = [np.zeros_like(w) for w in weights]
    state = (
        *(jax.device_put(list(g), places) for g in (weights, zeros, zeros)),
        jax.device_put(
            np.zeros((), "float32"), NamedSharding(mesh, PartitionSpec())
        ),
    )
    home = NamedSharding(mesh, split)

    def epoch():
        nonlocal state
        for k in range(options.steps):
            part = slice(k * rows, (k + 1) * rows)
            batch = jax.device_put((x[part], y[part]), home)
            state, value = mapped(state, *batch)
            jax.block_until_ready(value)

    return epoch


def megabytes():
    """MB on the first device of what is alive."""
    import jax

    device = jax.devices()[0]
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device:
                place = shard.data.unsafe_buffer_pointer()
                buffers[place] = shard.data.nbytes
    return {"mb": sum(buffers.values()) / 1e6}


def start(peer, model, devices, log):
    words = ("--peer", peer, "--model", model, "--devices-one", str(devices))
    return turns.start(
        list(words), on_tensorflow=False, devices=devices, log=log
    )


def report(options):
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "devices", "peer", "ms a step", "ours / it", "MB")
    for model in options.models:
        for devices in options.devices:
            told = turns.session(
                options.peers,
                lambda peer, log, m=model, d=devices: start(peer, m, d, log),
                options.repeats,
            )
            for peer, each in told.items():
                ratios = [
                    ours["ms"] / its["ms"]
                    for ours, its in zip(told["ours"], each, strict=True)
                ]
                table.add_row(
                    model,
                    str(devices),
                    peer,
                    f"{statistics.median(t['ms'] for t in each):.2f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{statistics.median(t['mb'] for t in each):.2f}",
                )
    Console().print(table)


def main():
    if "--tpu" in sys.argv:
        import sharded_tpu

        sharded_tpu.main()
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the MLP alone")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--devices-one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        options.steps = SIZES[options.model][1]
        turns.serve(fitted(options), options.steps, megabytes)
        return
    if options.quick:
        options.models, options.devices = ["mlp"], [2]
    report(options)


if __name__ == "__main__":
    main()
