"""The arguments of fit on several processes; see `test_arguments`.

Each function trains and returns numbers; one process gets the same global
batches where the data are each process's own.
"""

import os
import random
import tempfile

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.multi_process import scenarios
from tests.multi_process.records import parse, values, write
from tests.support.optional import without_torch
from tests.support.plain_keras import assert_same

X, Y = scenarios.data(30)
COUNT = 2  # Processes; one process does as these would.


def infinite(rows, size):
    while True:
        yield from scenarios.generator(rows, size)


def differently():
    """Leaves each process's random state at another place."""
    np.random.seed(jax.process_index())
    random.seed(jax.process_index())


def fit(model, *args, **kwargs):
    kwargs = {"verbose": 0, "shuffle": False, "epochs": 2} | kwargs
    return {"history": model.fit(*args, **kwargs).history}


def steps_per_epoch(strategy, model):
    return fit(model, infinite(30, 8), steps_per_epoch=3, epochs=4)


def steps_per_execution(strategy, model):
    model.steps_per_execution = 3
    return fit(model, infinite(30, 8), steps_per_epoch=5, epochs=3)


def validation_data(strategy, model):
    return fit(model, X, Y, batch_size=8, validation_data=scenarios.data(13))


def validation_split(strategy, model):
    return fit(model, X, Y, batch_size=8, validation_split=0.37)


def validation_generator(strategy, model):
    return fit(
        model,
        scenarios.Batches(30, 8),
        validation_data=infinite(13, 4),
        validation_steps=3,
        validation_freq=2,
        epochs=4,
    )


def sample_weight(strategy, model):
    weight = np.linspace(0.1, 2, 30).astype("float32")
    return fit(model, X, Y, batch_size=8, sample_weight=weight)


def class_weight(strategy, model):
    model.compile("sgd", "mse", weighted_metrics=["mae"])
    import tensorflow as tf

    labels = (Y > 0).astype("int32")
    dataset = tf.data.Dataset.from_tensor_slices((X, labels)).batch(8)
    weight = {0: 0.5, 1: 2.0}
    return {
        "arrays": fit(model, X, labels, batch_size=8, class_weight=weight),
        "tf.data": fit(model, dataset, class_weight=weight),
    }


def early_stopping(strategy, model):
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10, patience=1)
    first = fit(model, X, Y, batch_size=8, epochs=9, callbacks=[stop])

    class StopEarly(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    second = fit(
        model, scenarios.Batches(30, 8), epochs=9, callbacks=[StopEarly()]
    )
    third = fit(model, infinite(30, 8), steps_per_epoch=2)
    return [first, second, third]


def other_data(strategy, model):
    return [
        fit(model, X, Y, batch_size=8),
        fit(model, *scenarios.data(17), batch_size=5),
        fit(model, scenarios.generator(13, 4), epochs=1),
    ]


def predict_order(strategy, model):
    outputs = {}
    for rows, size in [(30, 8), (5, 8), (1, 4), (9, 1)]:
        x = scenarios.data(rows)[0]
        outputs[f"{rows}/{size}"] = model.predict(
            x, batch_size=size, verbose=0
        ).tolist()
        dataset = scenarios.tf_dataset(rows, size).map(lambda x, y: x)
        outputs[f"tf.data {rows}/{size}"] = model.predict(
            dataset, verbose=0
        ).tolist()
    return outputs


ALIKE = [
    *(steps_per_epoch, steps_per_execution, validation_data, validation_split),
    *(validation_generator, sample_weight, class_weight),
    *(early_stopping, other_data, predict_order),
]


class Seen(keras.layers.Layer):
    """Remembers the first numbers of its rows, in order of the steps."""

    rows: list[int] = []

    def call(self, x):
        jax.debug.callback(self.see, x[:, 0], ordered=False)
        return x

    @classmethod
    def see(cls, numbers):
        cls.rows += [int(n) for n in np.asarray(numbers).ravel()]


def shuffled(strategy, model):
    """Which rows this process's replicas are given; another seed in each."""
    differently()
    x = np.arange(24, dtype="float32")[:, None]
    orders = {}
    makers = {
        "arrays": lambda: {"x": x, "y": x, "batch_size": 8},
        "tf.data": lambda: {"x": shuffled_tf_data(x)},
        "torch": lambda: {"x": shuffled_torch(x)},
    }
    for name, maker in without_torch(makers).items():
        Seen.rows = []
        with strategy.scope():
            seeing = keras.Sequential([Seen(), keras.layers.Dense(1)])
            seeing.compile("sgd", "mse")
        seeing.fit(**maker(), shuffle=name == "arrays", verbose=0)
        jax.effects_barrier()
        orders[name] = Seen.rows
    return orders


def shuffled_tf_data(x):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, x)).shuffle(24).batch(8)


def shuffled_torch(x):
    import torch

    dataset = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(x))
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)


def shared(batches, each=4):
    """Global batches of two processes' own rows, so many of each a step."""
    first, second = (
        [np.concatenate(part) for part in zip(*own, strict=True)]
        for own in batches
    )
    made = []
    for start in range(0, max(len(first[0]), len(second[0])), each):
        rows = slice(start, start + each)
        made.append(
            tuple(
                np.concatenate([a[rows], b[rows]])
                for a, b in zip(first, second, strict=True)
            )
        )
    return made


class Listed(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


OWN_ROWS = ks.InputOptions(
    distribute=ks.data.DistributeOptions(
        auto_shard_policy=ks.data.AutoShardPolicy.OFF
    )
)


def off(strategy, model):
    """Each process has rows of its own, of unequal numbers."""
    own = [
        [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 18, 4)],
        [(X[i : i + 3], Y[i : i + 3]) for i in range(18, 27, 3)],
    ]
    if jax.process_count() == 1:
        # Regrouped to the share of a batch of 8, whatever their own size.
        dataset = Listed(shared(own))
    else:
        import tensorflow as tf

        whole = [
            np.concatenate(part)
            for part in zip(*own[jax.process_index()], strict=True)
        ]
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(tuple(whole))
            .batch(8)
            .with_options(off_options()),
            OWN_ROWS,
        )
    return [fit(model, dataset), model.evaluate(dataset, verbose=0)]


def off_options():
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    return options


def off_py_dataset(strategy, model):
    own = [
        [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)],
        [(X[i : i + 4], Y[i : i + 4]) for i in range(20, 28, 4)],
    ]
    if jax.process_count() == 1:
        # A batch of 4 is the global one, as in tf: 2 rows of each process.
        dataset = Listed(shared(own, each=2))
    else:
        dataset = strategy.experimental_distribute_dataset(
            Listed(own[jax.process_index()]),
            OWN_ROWS,
        )
    return [fit(model, dataset), model.evaluate(dataset, verbose=0)]


def by_file(strategy, model):
    """TFRecord files of unequal sizes; process i reads files i, i + 2, ..."""
    import tensorflow as tf

    sizes = [7, 1, 4, 9, 2]
    directory = tempfile.mkdtemp()
    paths = write(directory, sizes)
    ends = np.cumsum(sizes)
    rows = [range(e - s, e) for s, e in zip(sizes, ends, strict=True)]
    table = np.stack([values(row) for row in range(sum(sizes))])
    if jax.process_count() == 1:
        own = [sum(map(list, rows[i::COUNT]), []) for i in range(COUNT)]
        dataset = Listed(shared([[(table[o, :3], table[o, 3:])] for o in own]))
    else:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        dataset = tf.data.TFRecordDataset(paths).map(parse).batch(8)
        dataset = dataset.with_options(options)
    return [
        fit(model, dataset),
        model.evaluate(dataset, verbose=0),
        model.evaluate(table[:, :3], table[:, 3:], verbose=0),
    ]


OWN = [off, off_py_dataset, by_file]


def check_equal(one, both):
    """All processes of two were told the same, and what one was told."""
    for told in both:
        assert told == both[0]
        assert_same(one, told)


def run(names=None, strategy=None):
    results = {}
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    for act in [*ALIKE, *OWN, shuffled]:
        if names and act.__name__ not in names:
            continue
        model = scenarios.build(strategy)
        results[act.__name__] = {
            "told": act(strategy, model),
            "weights": [w.tolist() for w in model.get_weights()],
        }
        if act is not shuffled:
            assert_replicated(model)
        print(act.__name__, os.times().user, flush=True)
    return results
