"""What input costs: fit from each source, and the feed alone.

`fit`: the wide MLP of `bench fit` on virtual CPU devices, from each source,
against `device`: a batch that lies on the devices already, given again and
again. `feed`: rows a second of the input pipeline alone, each batch waited for
on the devices. Every peer is a fresh process, and they take turns (turns.py);
medians of the turns are compared.

    ./run bench input
    ./run bench input --parts fit --sources numpy grain --repeats 9
    ./run bench input --parts feed --rows images

Peers of the feed: `loop` (a distributed dataset), `fit` (what fit reads);
beside fit `keras` (what Keras's fit reads with keras.distribution.
DataParallel) and `put` (Keras's adapter and one `device_put` a batch, by
hand); beside the loop `tf` (the distributed iterator of tf.distribute.
MirroredStrategy) and `tf graph` (the same, in the loop of a tf.function).

`grain` reads whole batches from its source; `grain rows` reads single ones,
for which grain itself takes 10 to 20 us each, and batches them.
"""

import argparse
import json
import os
import statistics
import tempfile

import turns

SOURCES = (
    "numpy",
    "PyDataset",
    "generator",
    "tf.data",
    "grain",
    "grain rows",
    "torch",
    "files",
)
PEERS = ("loop", "fit", "keras", "put", "tf", "tf graph")
# What each is compared with.
OURS = {"keras": "fit", "put": "fit", "tf": "loop", "tf graph": "loop"}
# What TensorFlow can read as well.
OF_TENSORFLOW = ("numpy", "generator", "tf.data")
BATCH_SIZE = 256
FIT_STEPS = 40
# Name of the rows: their shape, and batches of an epoch of the feed.
ROWS = {"vectors": ((32,), 400), "images": ((32, 32, 3), 40)}


def arrays(steps, shape):
    import numpy as np

    random = np.random.default_rng(0)
    rows = BATCH_SIZE * steps
    x = random.normal(size=(rows, *shape)).astype("float32")
    return x, random.integers(0, 10, rows).astype("int32")


def write_files(directory, steps, shape):
    """Four files of rows, not compressed."""
    import numpy as np

    x, y = arrays(steps, shape)
    for index in range(4):
        part = slice(index * len(x) // 4, (index + 1) * len(x) // 4)
        np.savez(f"{directory}/{index}.npz", x=x[part], y=y[part])


class Batches:
    """Batches of arrays: one by its index, or all."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // BATCH_SIZE

    def __getitem__(self, index):
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self.x[rows], self.y[rows]

    def generator(self):
        for index in range(len(self)):
            yield self[index]


class Rows:
    """Rows of arrays, one by one, for grain."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def py_dataset(batches):
    import keras

    class Dataset(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    return Dataset()


def make_dataset(source, x, y, directory):
    """The rows in batches, as a user would give them to fit."""
    if source == "PyDataset":
        return py_dataset(Batches(x, y))
    if source == "tf.data":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return rows.batch(BATCH_SIZE)
    if source == "grain":
        import grain

        return grain.MapDataset.source(Batches(x, y))
    if source == "grain rows":
        import grain

        return grain.MapDataset.source(Rows(x, y)).batch(BATCH_SIZE)
    if source == "torch":
        from torch import from_numpy
        from torch.utils import data

        rows = data.TensorDataset(from_numpy(x), from_numpy(y))
        return data.DataLoader(rows, batch_size=BATCH_SIZE)
    import keras_strategies as ks

    return ks.data.files(
        f"{directory}/*.npz", "npz", keys=("x", "y"), batch_size=BATCH_SIZE
    )


def input_arguments(source, x, y, directory):
    """A function that returns the arguments of `fit`.

    They are the same ones each time, but for a generator, which runs once.
    """
    if source == "generator":
        batches = Batches(x, y)
        return lambda: {"x": batches.generator()}
    if source == "numpy":
        arguments = {"x": x, "y": y, "batch_size": BATCH_SIZE}
    else:
        arguments = {"x": make_dataset(source, x, y, directory)}
    return lambda: arguments


def fitted(source, directory):
    """A function that trains for an epoch."""
    import fit
    import jax

    import keras_strategies as ks

    x, y = arrays(FIT_STEPS, (32,))
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = fit.build("wide_mlp", 1)
    if source == "device":
        batch = jax.device_put(Batches(x, y)[0], strategy._runtime.mesh.split)
        again = py_dataset([batch] * FIT_STEPS)
        return lambda: model.fit(again, shuffle=False, verbose=0)
    arguments = input_arguments(source, x, y, directory)
    return lambda: model.fit(**arguments(), shuffle=False, verbose=0)


def fed(options):
    """A function that reads an epoch, and its number of batches."""
    peer, source = options.peer, options.sources[0]
    shape, steps = ROWS[options.rows]
    x, y = arrays(steps, shape)
    if peer == "tf":
        return fed_by_tf(source, x, y, options.devices), steps
    if peer == "tf graph":
        return fed_by_tf_graph(source, x, y, options.devices), steps
    import jax

    import keras_strategies as ks

    strategy = ks.MirroredStrategy()
    arguments = input_arguments(source, x, y, options.directory)
    readers = {"loop": by_loop, "fit": by_fit, "keras": by_keras, "put": by_put}
    batches = readers[peer](strategy, source, arguments)

    def epoch():
        count = 0
        for batch in batches():
            jax.block_until_ready(batch)
            count += 1
        assert count == steps, count

    return epoch, steps


def by_loop(strategy, source, arguments):
    """A function that returns the batches of a custom loop."""
    distribute = strategy.experimental_distribute_dataset
    if source == "generator":
        return lambda: distribute(arguments()["x"])
    given = arguments()
    dataset = given["x"]
    if source == "numpy":
        rows = strategy.experimental_make_numpy_dataset((dataset, given["y"]))
        dataset = rows.batch(BATCH_SIZE)
    distributed = distribute(dataset)
    return lambda: distributed


def by_fit(strategy, source, arguments):
    """A function that returns the executions of fit."""
    from keras_strategies.fit.inputs.feed import make_feed

    del source

    def batches():
        feed = make_feed(strategy._runtime.mesh, **arguments())
        feed.on_epoch_begin()
        yield from feed.get_jax_iterator()
        feed.on_epoch_end()

    return batches


def by_keras(strategy, source, arguments):
    """A function that returns what Keras's own fit reads."""
    import keras
    from keras.src.backend.jax.trainer import JAXEpochIterator

    del strategy, source
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(
            devices=keras.distribution.list_devices()
        )
    )

    def batches():
        epoch = JAXEpochIterator(**arguments())
        epoch.data_adapter.on_epoch_begin()
        yield from epoch._get_iterator()
        epoch.data_adapter.on_epoch_end()

    return batches


def by_put(strategy, source, arguments):
    """A function that returns the batches of Keras's adapter, placed."""
    import jax
    from keras.src.trainers.data_adapters import get_data_adapter

    del source

    def batches():
        adapter = get_data_adapter(**arguments())
        adapter.on_epoch_begin()
        for batch in adapter.get_jax_iterator():
            yield jax.device_put(batch, strategy._runtime.mesh.split)
        adapter.on_epoch_end()

    return batches


def fed_by_tf(source, x, y, devices):
    dataset, _ = distributed_by_tf(source, x, y, devices)

    def epoch():
        count = sum(1 for _ in dataset)
        assert count == len(x) // BATCH_SIZE, count

    return epoch


def fed_by_tf_graph(source, x, y, devices):
    import tensorflow as tf

    dataset, strategy = distributed_by_tf(source, x, y, devices)

    @tf.function
    def read():
        rows = 0
        for _, labels in dataset:
            for part in strategy.experimental_local_results(labels):
                rows += tf.size(part)
        return rows

    def epoch():
        rows = int(read())
        assert rows == len(x), rows

    return epoch


def distributed_by_tf(source, x, y, devices):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * devices
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(devices)]
    )
    if source == "generator":
        signature = (
            tf.TensorSpec((None, *x.shape[1:]), tf.float32),
            tf.TensorSpec((None,), tf.int32),
        )
        dataset = tf.data.Dataset.from_generator(
            Batches(x, y).generator, output_signature=signature
        )
    else:
        dataset = make_dataset("tf.data", x, y, None)
    return strategy.experimental_distribute_dataset(dataset), strategy


def serve(options):
    """One peer's process."""
    if options.peer == "model":
        turns.serve(fitted(options.sources[0], options.directory), FIT_STEPS)
        return
    turns.serve(*fed(options))


def session(peers, options, rows):
    """Milliseconds a step of each peer: a pair of its kind and its source."""

    def start(peer, log):
        kind, source = peer
        arguments = {
            "--peer": kind,
            "--sources": source,
            "--rows": rows,
            "--devices": options.devices,
            "--directory": f"{options.directory}/{rows}",
        }
        return turns.start(
            [str(part) for item in arguments.items() for part in item],
            on_tensorflow=kind.startswith("tf"),
            devices=options.devices,
            log=log,
        )

    told = turns.session(peers, start, options.repeats)
    return {peer: [t["ms"] for t in each] for peer, each in told.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--parts", nargs="+", choices=("fit", "feed"), default=("fit", "feed")
    )
    parser.add_argument("--sources", nargs="+", default=SOURCES)
    parser.add_argument("--rows", choices=(*ROWS, "fit"), default="vectors")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    for hidden in ("--peer", "--directory"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as options.directory:
        report(options)


def report(options):
    """Measures all, prints tables of medians and ratios."""
    from rich.console import Console

    samples = {}
    console = Console(width=100)
    if "fit" in options.parts:
        os.mkdir(f"{options.directory}/fit")
        write_files(f"{options.directory}/fit", FIT_STEPS, (32,))
        peers = [("model", s) for s in ("device", *options.sources)]
        measured = session(peers, options, "fit")
        samples["fit"] = {source: ms for (_, source), ms in measured.items()}
        console.print(table_of_fit(samples["fit"], options))
    if "feed" in options.parts:
        shape, steps = ROWS[options.rows]
        os.mkdir(f"{options.directory}/{options.rows}")
        write_files(f"{options.directory}/{options.rows}", steps, shape)
        samples["feed"] = {}
        for source in options.sources:
            peers = [(peer, source) for peer in list_peers(source)]
            measured = session(peers, options, options.rows)
            samples["feed"][source] = {
                peer: ms for (peer, _), ms in measured.items()
            }
        console.print(table_of_feed(samples["feed"], options))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"devices": options.devices, **samples}, file)


def list_peers(source):
    """Who can read it: Keras knows no files, TensorFlow only some."""
    return [
        peer
        for peer in PEERS
        if not (peer in ("keras", "put") and source == "files")
        and not (peer.startswith("tf") and source not in OF_TENSORFLOW)
    ]


def table_of_fit(samples, options):
    from rich.table import Table

    medians = {source: statistics.median(ms) for source, ms in samples.items()}
    table = Table(
        title=f"fit of the wide MLP on {options.devices} virtual CPU devices, "
        f"medians of {options.repeats}"
    )
    table.add_column("source")
    table.add_column("ms a step", justify="right")
    table.add_column("source / device", justify="right")
    for source, ms in medians.items():
        table.add_row(source, f"{ms:.2f}", f"{ms / medians['device']:.2f}x")
    return table


def table_of_feed(samples, options):
    """Ours beside the peers: what fit reads, or a custom loop."""
    from rich.table import Table

    shape, _ = ROWS[options.rows]
    table = Table(
        title=f"the feed alone on {options.devices} virtual CPU devices, "
        f"1000 rows a second (ours / peer), medians of {options.repeats}; "
        f"{BATCH_SIZE} rows of {shape} a batch"
    )
    table.add_column("source")
    for peer in PEERS:
        table.add_column(peer, justify="right", no_wrap=True)
    for source, measured in samples.items():
        speeds = {
            peer: BATCH_SIZE / statistics.median(ms)
            for peer, ms in measured.items()
        }
        cells = []
        for peer in PEERS:
            text = f"{speeds[peer]:.0f}" if peer in speeds else ""
            if text and peer in OURS:
                text += f" ({speeds[OURS[peer]] / speeds[peer]:.2f}x)"
            cells.append(text)
        table.add_row(source, *cells)
    return table


if __name__ == "__main__":
    main()
