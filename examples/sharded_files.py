"""Trains from TFRecord files on two processes, each reading its own files.

The processes run on this machine, with two virtual CPU devices each. Prints
which process read which file. Asserts that each file was read by one process,
every row once; that both processes end with the same weights and logs; and
that these are what one process gets from the same batches.

    python examples/sharded_files.py

Needs TensorFlow: pip install tensorflow-cpu
"""

import importlib.util
import os
import pathlib
import sys
import tempfile

NUM_PROCESSES = 2
BATCH_SIZE = 32
EPOCHS = 3
# Neither the files nor what the processes read are of one length.
ROWS_OF_FILES = (70, 64, 55, 81, 49, 60)
TOLERANCE = 1e-5
TIME_LIMIT_S = 600


def rows():
    """All rows: the inputs and the class of each."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(sum(ROWS_OF_FILES), 8)).astype("float32")
    return x, (x[:, 0] * x[:, 1] > 0).astype("int32")


def write_files(directory):
    """Writes the rows, and returns the paths of the files."""
    import tensorflow as tf

    x, y = rows()
    paths, first = [], 0
    for number, count in enumerate(ROWS_OF_FILES):
        paths.append(os.path.join(directory, f"train-{number}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as file:
            for row in range(first, first + count):
                file.write(record(row, x[row], y[row]))
        first += count
    return paths


def record(row, x, y):
    from tensorflow import train

    feature = {
        "row": train.Feature(int64_list=train.Int64List(value=[row])),
        "x": train.Feature(float_list=train.FloatList(value=x)),
        "y": train.Feature(int64_list=train.Int64List(value=[y])),
    }
    features = train.Features(feature=feature)
    return train.Example(features=features).SerializeToString()


def pipeline(paths, names):
    """Global batches of some of a record's features."""
    import tensorflow as tf

    spec = {
        "row": tf.io.FixedLenFeature((), tf.int64),
        "x": tf.io.FixedLenFeature((8,), tf.float32),
        "y": tf.io.FixedLenFeature((), tf.int64),
    }

    def parse(serialized):
        features = tf.io.parse_single_example(serialized, spec)
        return tuple(features[name] for name in names)

    return tf.data.TFRecordDataset(paths).map(parse).batch(BATCH_SIZE)


def build(strategy):
    """A small classifier; every initial weight comes from a seed."""
    import keras

    def dense(units, seed, **options):
        start = keras.initializers.GlorotUniform(seed)
        return keras.layers.Dense(units, kernel_initializer=start, **options)

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), dense(32, 1, activation="relu"), dense(2, 2)]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def trained(strategy, dataset):
    """What a process ends with."""
    model = build(strategy)
    history = model.fit(dataset, epochs=EPOCHS, shuffle=False, verbose=0)
    weights = [weight.tolist() for weight in model.get_weights()]
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    return {"history": history.history, "weights": weights, "evaluate": logs}


def train_together(paths):
    """What each of the processes runs.

    A tf.data pipeline that reads as many files as there are processes, or
    more, is divided by files: each process opens its own only.
    """
    import numpy as np

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    result = trained(strategy, pipeline(paths, ("x", "y")))
    result["steps"] = []
    places = pipeline(paths, ("row",))
    for batch in strategy.experimental_distribute_dataset(places):
        replica_rows = strategy.experimental_local_results(batch)
        own = np.concatenate([row for (row,) in replica_rows])
        result["steps"].append(own.tolist())
    return result


def train_alone(steps):
    """Trains on one process, from the same batches."""
    import keras

    import keras_strategies as ks

    x, y = rows()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(steps)

        def __getitem__(self, index):
            return x[steps[index]], y[steps[index]]

    return trained(ks.MirroredStrategy(), Batches())


def read_record(row):
    """The number of the file that a row is in."""
    import numpy as np

    ends = np.cumsum(ROWS_OF_FILES)
    return int(np.searchsorted(ends, row, side="right"))


def check_files(results):
    """Returns the files of each process, each of which one process read."""
    seen = [[row for step in r["steps"] for row in step] for r in results]
    together = sorted(row for own in seen for row in own)
    assert together == list(range(sum(ROWS_OF_FILES))), "not every row once"
    files = [{read_record(row) for row in own} for own in seen]
    assert not set.intersection(*files), f"files read twice: {files}"
    assert set.union(*files) == set(range(len(ROWS_OF_FILES)))
    return files


def largest_difference(result, expected):
    """max |a - b| over weights, logs and evaluation."""
    import numpy as np

    pairs = [
        *zip(result["weights"], expected["weights"], strict=True),
        *(
            (result[part][name], expected[part][name])
            for part in ("history", "evaluate")
            for name in expected[part]
        ),
    ]
    return max(
        float(np.abs(np.subtract(actual, wanted)).max())
        for actual, wanted in pairs
    )


def print_files(paths, files):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Who read which file")
    for column in ("file", "rows", "process"):
        justify = "left" if column == "file" else "right"
        table.add_column(column, justify=justify)
    for number, (path, count) in enumerate(
        zip(paths, ROWS_OF_FILES, strict=True)
    ):
        readers = [i for i, own in enumerate(files) if number in own]
        table.add_row(
            os.path.basename(path), str(count), ", ".join(map(str, readers))
        )
    Console().print(table)


def print_result(results, difference):
    from rich.console import Console
    from rich.table import Table

    steps = [[len(step) for step in result["steps"]] for result in results]
    of_each = zip(*steps, strict=True)
    logs = results[0]["evaluate"]
    table = Table(title="Training on both", show_header=False)
    table.add_row(
        "rows of each step", ", ".join(f"{a}+{b}" for a, b in of_each)
    )
    table.add_row("accuracy", f"{logs['accuracy']:.3f}")
    table.add_row("loss", f"{logs['loss']:.4f}")
    table.add_row(
        "both processes - one, fed the same batches",
        f"max |d| = {difference:.1e} (tolerance {TOLERANCE:.0e})",
    )
    Console().print(table)


def main():
    if not importlib.util.find_spec("tensorflow"):
        sys.exit(
            "TFRecord files are written and read with TensorFlow, which is "
            "not installed. Run: pip install tensorflow-cpu"
        )
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # The processes import this file.
    own = str(pathlib.Path(__file__).parent.resolve())
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, *path]))

    from keras_strategies.testing import run_processes

    with tempfile.TemporaryDirectory() as directory:
        paths = write_files(directory)
        results = [
            result.value
            for result in run_processes(
                "sharded_files:train_together",
                NUM_PROCESSES,
                args=[paths],
                timeout_s=TIME_LIMIT_S,
            )
        ]
    print_files(paths, check_files(results))
    trained_parts = [
        {name: result[name] for name in ("history", "weights", "evaluate")}
        for result in results
    ]
    assert all(part == trained_parts[0] for part in trained_parts), (
        "the processes end with other weights or logs"
    )
    # A step's batch is what the processes hold of it.
    of_each = [result["steps"] for result in results]
    steps = [sum(parts, []) for parts in zip(*of_each, strict=True)]
    (alone,) = run_processes(
        "sharded_files:train_alone", 1, args=[steps], timeout_s=TIME_LIMIT_S
    )
    difference = largest_difference(trained_parts[0], alone.value)
    print_result(results, difference)
    assert difference <= TOLERANCE, f"the results differ by {difference:.1e}"


if __name__ == "__main__":
    main()
