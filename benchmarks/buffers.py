"""Step times of the ways in which small arrays share an all-reduce on CPU.

Models with small gradients, on virtual CPU devices. Every way is a model of its
own in one process; they take turns, a fit (or a custom loop) each. Printed are
the medians and minima of the turns, ratios of the medians to the first way, and
the seconds of the first steps, which compile.

    ./run bench buffers
    ./run bench buffers --devices 4 --widths 16 64 --depths 3 30 --rows 16
    ./run bench buffers --models cnn lstm transformer --ways ours padded each
    ./run bench buffers --loop custom --spe 1

Ways: `ours`; `padded` (written into a buffer of zeros, which XLA makes a `pad`
of the first array, and no buffer for arrays of more than 40 shapes); `joined`
(one `concatenate`); `each` (no buffers); `unlimited` (ours, however many
shapes); `smaller` and `larger` (unlimited, with arrays of up to 16384 and 2^18
entries); `dataparallel` (keras.distribution.DataParallel, which has no custom
loop).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

WAYS = (
    "ours",
    "padded",
    "joined",
    "each",
    "unlimited",
    "smaller",
    "larger",
    "dataparallel",
)
MODELS = ("mlp", "cnn", "lstm", "transformer", "normalized")
LIMITS = {
    "padded": (4096, 40),
    "joined": (4096, None),
    "each": (-1, None),
    "unlimited": (2**16, None),
    "smaller": (2**14, None),
    "larger": (2**18, None),
}


def build(name, width, depth):
    import keras
    from keras import layers

    if name == "cnn":
        stack = [keras.Input((16, 16, 3))]
        for filters in (16, 32):
            stack += [
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        return keras.Sequential([*stack, layers.Flatten(), layers.Dense(10)])
    if name == "lstm":
        return keras.Sequential(
            [keras.Input((8, 16)), layers.LSTM(32), layers.Dense(10)]
        )
    if name == "transformer":
        inputs = keras.Input((32, 64))
        value = inputs
        for _ in range(2):
            attended = layers.MultiHeadAttention(4, 16)(value, value)
            value = layers.LayerNormalization()(value + attended)
            hidden = layers.Dense(128, activation="relu")(value)
            value = layers.LayerNormalization()(
                value + layers.Dense(64)(hidden)
            )
        value = layers.GlobalAveragePooling1D()(value)
        return keras.Model(inputs, layers.Dense(10)(value))
    # The first gradient of `normalized` is a sum over rows.
    stack = [keras.Input((32,))]
    if name == "normalized":
        stack.append(layers.BatchNormalization())
    stack += [layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([*stack, layers.Dense(10)])


def use(way):
    """Lets the next trace sum its arrays in one of the ways."""
    import jax.numpy as jnp
    from jax.lax import dynamic_update_slice

    from keras_strategies.spmd import buffers

    def padded(arrays, axis):
        total = sum(array.size for array in arrays)
        buffer, start = jnp.zeros((total,), arrays[0].dtype), 0
        for array in arrays:
            buffer = dynamic_update_slice(buffer, array.ravel(), (start,))
            start += array.size
        return buffer

    def joined(arrays, axis):
        return jnp.concatenate([array.ravel() for array in arrays])

    if "ours" not in use.__dict__:
        use.ours = buffers.IN_PROCESS
        use.pack = buffers.pack
    buffers.IN_PROCESS = use.ours
    if way in LIMITS:
        entries, shapes = LIMITS[way]
        buffers.IN_PROCESS = buffers.Buffering(
            max_entries=entries, max_shapes=shapes
        )
    packs = {"padded": padded, "joined": joined}
    buffers.pack = packs.get(way, use.pack)


def fitted(way, model_name, width, depth, rows, count):
    """A function that trains for a number of steps with `fit`."""
    import keras

    import keras_strategies as ks

    devices = keras.distribution.list_devices("cpu")
    is_peer = way == "dataparallel"
    peer = keras.distribution.DataParallel(devices=devices) if is_peer else None

    def compiled():
        model = build(model_name, width, depth)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=count,
        )
        return model

    keras.distribution.set_distribution(peer)
    if is_peer:
        model = compiled()
    else:
        use(way)
        with ks.MirroredStrategy().scope():
            model = compiled()
    keras.distribution.set_distribution(None)

    def work(steps):
        x, y = data(model_name, rows * len(devices) * steps)
        keras.distribution.set_distribution(peer)
        model.fit(
            x,
            y,
            batch_size=rows * len(devices),
            verbose=0,
            shuffle=False,
        )
        keras.distribution.set_distribution(None)

    return work, model


def looped(way, model_name, width, depth, rows, count):
    """A function that trains with `run` in a jitted function."""
    import jax
    import keras

    import keras_strategies as ks

    use(way)
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = build(model_name, width, depth)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    batch = rows * len(jax.devices())

    def loss_of(x, y):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return ks.compute_average_loss(losses, global_batch_size=batch)

    def step(x, y):
        loss, grads = ks.value_and_grad(loss_of, model.trainable_variables)(
            x, y
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

    x, y = data(model_name, batch)
    dataset = strategy.experimental_make_numpy_dataset((x, y)).batch(batch)
    placed = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def work(steps):
        for _ in range(steps):
            loss = strategy.run(step, args=placed)
        jax.block_until_ready(strategy.reduce("sum", loss, axis=None))

    return work, model


def data(model_name, rows, known={}):  # noqa: B006
    import numpy as np

    key = model_name, rows
    if key not in known:
        random = np.random.default_rng(0)
        shape = {"cnn": (16, 16, 3), "lstm": (8, 16), "transformer": (32, 64)}
        x = random.normal(size=(rows, *shape.get(model_name, (32,))))
        known[key] = x.astype("float32"), random.integers(0, 10, rows)
    return known[key]


def measured(point, options):
    """The record of one point: milliseconds of each way's turns."""
    make = looped if options.loop == "custom" else fitted
    count = point[-1]
    works, seconds, weights, steps = {}, {}, {}, None
    for way in options.ways:
        import keras

        keras.utils.set_random_seed(0)
        work, model = make(way, *point)
        start = time.perf_counter()
        work(2 * count)
        seconds[way] = time.perf_counter() - start
        weights[way] = [w.tobytes() for w in model.get_weights()]
        if steps is None:
            work(10 * count)
            start = time.perf_counter()
            work(10 * count)
            one = (time.perf_counter() - start) / 10 / count
            steps = max(2, round(options.seconds / one / count)) * count
        work(steps)
        works[way] = work
    ms = {way: [] for way in works}
    for _ in range(options.turns):
        for way, work in works.items():
            start = time.perf_counter()
            work(steps)
            ms[way].append((time.perf_counter() - start) / steps * 1e3)
    equal = {way: weights[way] == weights[options.ways[0]] for way in works}
    names = ("model", "width", "depth", "rows", "spe")
    return {
        **dict(zip(names, point, strict=True)),
        "devices": options.devices,
        "loop": options.loop,
        "ms": ms,
        "first_s": seconds,
        "equal": equal,
    }


def show(record):
    point = (
        f"{record['model']:11} {record['width']:4} x {record['depth']:2}, "
        f"{record['devices']} x {record['rows']:3} rows, K={record['spe']:2}"
    )
    first = next(iter(record["ms"].values()))
    cells = []
    for way, ms in record["ms"].items():
        median, minimum = statistics.median(ms), min(ms)
        ratio = median / statistics.median(first)
        cells.append(
            f"{way} {median:.3f} ({ratio:.2f}x, min {minimum:.3f}, first "
            f"{record['first_s'][way]:.1f} s"
            f"{'' if record['equal'][way] else ', other bits'})"
        )
    print(f"{point}: {'; '.join(cells)}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp"])
    several = {"nargs": "+", "type": int}
    parser.add_argument("--widths", **several, default=[16, 64, 256])
    parser.add_argument("--depths", **several, default=[3])
    parser.add_argument("--rows", **several, default=[32], help="a replica's")
    parser.add_argument("--spe", **several, default=[1, 20])
    parser.add_argument("--loop", choices=("fit", "custom"), default="fit")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    parser.add_argument("--json", help="append the records to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.child:
        flag = f"--xla_force_host_platform_device_count={options.devices}"
        environment = os.environ | {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}",
        }
        command = [sys.executable, *sys.argv, "--child"]
        sys.exit(subprocess.run(command, env=environment).returncode)
    for point in itertools.product(
        options.models,
        options.widths,
        options.depths,
        options.rows,
        options.spe,
    ):
        record = measured(point, options)
        show(record)
        if options.json:
            with open(options.json, "a") as file:
                print(json.dumps(record), file=file)


if __name__ == "__main__":
    main()
