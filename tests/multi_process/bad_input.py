"""Data that is wrong in one process or in all; see `test_bad_input`.

Each case ends with one error in every process, and the model is used again.
"""

import itertools
import os
import time
import warnings

import jax
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.multi_process.scenarios import Batches, build, data, generator
from tests.support.waiting import wait_until

warnings.filterwarnings("ignore", "Your input ran out of data")
warnings.filterwarnings("ignore", ".shuffle=True. was passed")


def me():
    return jax.process_index()


def broken_generator():
    for index, batch in enumerate(generator(40, 8)):
        if index == 3 and me() == 1:
            raise OSError("the disk is gone")
        yield batch


def broken_at_once():
    if me() == 1:
        raise OSError("no such bucket")
    yield from generator(40, 8)


def shuffled_generator():
    x, y = data(32)
    order = np.random.default_rng(me()).permutation(32)
    for start in range(0, 32, 8):
        rows = order[start : start + 8]
        yield x[rows], y[rows]


def longer_generator():
    yield from itertools.islice(generator(40, 8), 4 + me())


def changing_generator():
    for index, (x, y) in enumerate(generator(40, 8)):
        yield ((x, x), y) if index == 3 and me() == 1 else (x, y)


def without_arrays():
    yield "text", "more text"


class Short(Batches):
    """Says that it has more batches than it has."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index >= 3:
            raise IndexError(f"no batch {index}")
        return super().__getitem__(index)


class Own(Batches):
    """Shuffles its rows in an order of the process's."""

    def __init__(self, rows, size, **kwargs):
        super().__init__(rows, size, **kwargs)
        order = np.random.default_rng(me()).permutation(rows)
        self.x, self.y = self.x[order], self.y[order]


class Hooked(Batches):
    """Fails in a hook of one process."""

    def on_epoch_begin(self):
        if me() == 1:
            raise OSError("no connection")


class Failing(Batches):
    """Fails in the middle in one process."""

    def __getitem__(self, index):
        if me() == 1 and index == 2:
            raise OSError("cannot decode")
        return super().__getitem__(index)


def tensors(rows, size, change=lambda dataset: dataset):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(data(rows))
    return change(dataset.batch(size) if size else dataset)


def ragged():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant([[1.0], [1.0, 2.0]] * 8), np.zeros(16))
    ).batch(8)


def records(directory, is_cut):
    """Two files of records; one of them cut off."""
    import tensorflow as tf

    from tests.multi_process.records import parse, write

    paths = write(directory, [16, 16])
    if is_cut:
        path = os.path.join(directory, f"cut-{me()}.tfrecord")
        with open(paths[1], "rb") as whole, open(path, "wb") as cut:
            cut.write(whole.read()[:-10])
        paths[1] = path
    return tf.data.TFRecordDataset(paths).map(parse).batch(8)


def files_in_one(directory, policy):
    import tensorflow as tf

    from tests.multi_process.records import parse, write

    paths = write(directory, [16])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    dataset = tf.data.TFRecordDataset(paths).map(parse).batch(8)
    return dataset.with_options(options)


def own(strategy, dataset):
    policy = ks.data.DistributeOptions(
        auto_shard_policy=ks.data.AutoShardPolicy.OFF
    )
    return strategy.experimental_distribute_dataset(
        dataset, ks.InputOptions(distribute=policy)
    )


class OwnBatches:
    def __iter__(self):
        return generator(16, 4)


def own_generator(strategy, break_at):
    class Dataset:
        def __iter__(self):
            for index, batch in enumerate(generator(40, 4)):
                if index == break_at and me() == 1:
                    raise OSError("own disk is gone")
                yield batch

    return own(strategy, Dataset())


def make_mistakes(strategy):
    def dataset_fn(context):
        if context.input_pipeline_id == 1:
            raise OSError("no shard here")
        return OwnBatches()

    return strategy.distribute_datasets_from_function(dataset_fn)


def arrays(rows=32, dtype="float32", shape=(3,), seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, *shape)).astype(dtype)
    return x, np.zeros((rows, 1), "float32")


def cases(strategy, model, directory):
    """What to call, by name."""

    def fit(*args, **kwargs):
        model.fit(*args, verbose=0, **{"shuffle": False} | kwargs)

    x, y = data(32)
    first = me() == 0
    wide = [(x, y), ((x, x), y)]
    return {
        "a generator fails": lambda: fit(broken_generator()),
        "a generator fails at K=3": lambda: with_steps(
            model, 3, lambda: fit(broken_generator())
        ),
        "a generator fails at once": lambda: fit(broken_at_once()),
        "evaluate fails": lambda: model.evaluate(broken_generator(), verbose=0),
        "predict fails": lambda: model.predict(broken_generator(), verbose=0),
        "validation fails": lambda: fit(
            x, y, validation_data=broken_generator(), validation_steps=5
        ),
        "lengths of arrays": lambda: fit(*arrays(32 + me()), batch_size=8),
        "contents of arrays": lambda: fit(*arrays(seed=me()), batch_size=8),
        "dtypes of arrays": lambda: fit(
            *arrays(dtype=["float32", "float16"][me()]), batch_size=8
        ),
        "shapes of arrays": lambda: fit(*arrays(shape=(3 + me(),))),
        "structures of arrays": lambda: fit(*wide[me()]),
        "batch sizes": lambda: fit(x, y, batch_size=8 * (1 + me())),
        "x and y of one process": lambda: fit(x, y[: 32 - me()]),
        "strings in one process": lambda: fit(
            x if first else np.array(["a"] * 32), y
        ),
        "a shorter PyDataset": lambda: fit(Short(40, 8)),
        "other numbers of batches": lambda: fit(Batches(32 + 8 * me(), 8)),
        "a PyDataset in two orders": lambda: fit(Own(32, 8)),
        "a PyDataset's hook": lambda: fit(Hooked(32, 8)),
        "a PyDataset fails": lambda: fit(Failing(32, 8)),
        "a PyDataset with workers fails": lambda: fit(
            Failing(32, 8, workers=2)
        ),
        "structure changes in one": lambda: fit(changing_generator()),
        "a generator of two orders": lambda: fit(shuffled_generator()),
        "a longer generator": lambda: fit(longer_generator()),
        "text": lambda: fit(without_arrays()),
        "an infinite dataset": lambda: fit(
            tensors(32, 8, lambda d: d.repeat())
        ),
        "an unbatched dataset": lambda: model.predict(
            tensors(8, None, lambda d: d.map(lambda x, y: y[0])), verbose=0
        ),
        "a ragged dataset": lambda: fit(ragged()),
        "an empty dataset": lambda: fit(tensors(32, 8, lambda d: d.take(0))),
        "too few files": lambda: fit(files_in_one(directory, "FILE")),
        "a cut record": lambda: fit(records(directory, True)),
        "own rows fail": lambda: fit(own_generator(strategy, 2)),
        "a function fails": lambda: make_mistakes(strategy),
        "another call": lambda: (
            fit(x, y, batch_size=8)
            if first
            else model.evaluate(x, y, batch_size=8, verbose=0)
        ),
        "other epochs": lambda: fit(x, y, batch_size=8, epochs=1 + me()),
        "validation in one": lambda: fit(
            x, y, batch_size=8, validation_data=(x, y) if first else None
        ),
        "steps per epoch": lambda: fit(
            generator(40, 8), steps_per_epoch=2 + me()
        ),
        "a process stays away": lambda: away(model, directory, (x, y)),
    }


def with_steps(model, steps, act):
    model.steps_per_execution = steps
    try:
        act()
    finally:
        model.steps_per_execution = 1


def away(model, directory, batch):
    """Process 1 does something else until process 0 has given up."""
    sign = os.path.join(directory, "given-up")
    if me() == 1:
        wait_until(lambda: os.path.exists(sign), 100)
    try:
        os.environ["KERAS_STRATEGIES_TIMEOUT_S"] = "3"
        model.evaluate(*batch, batch_size=8, verbose=0)
        # Process 0 was there once: what it said is heard still.
        os.environ["KERAS_STRATEGIES_TIMEOUT_S"] = "2"
        model.evaluate(*batch, batch_size=8, verbose=0)
    finally:
        del os.environ["KERAS_STRATEGIES_TIMEOUT_S"]
        with open(sign, "w"):
            pass


def run(directory, names=None):
    """Runs the cases; returns the errors and what came after them."""
    os.environ.setdefault("KERAS_STRATEGIES_TIMEOUT_S", "300")
    strategy = ks.MultiWorkerMirroredStrategy()
    model = build(strategy)
    x, y = data(32)
    model.fit(x, y, batch_size=8, verbose=0)
    results = {}
    for name, act in cases(strategy, model, directory).items():
        if names and name not in names:
            continue
        begin = time.monotonic()
        try:
            act()
            error = "no error"
        except Exception as raised:
            notes = getattr(raised, "__notes__", [])
            error = "\n".join([f"{type(raised).__name__}: {raised}", *notes])
        seconds = time.monotonic() - begin
        history = model.fit(x, y, batch_size=8, verbose=0).history
        assert_replicated(model)
        weights = [float(np.sum(w)) for w in model.get_weights()]
        results[name] = {
            "error": error,
            "after": [history, weights],
            "seconds": seconds,
        }
        print(name, round(seconds, 2), error[:3000], sep="\n  ", flush=True)
    return results
