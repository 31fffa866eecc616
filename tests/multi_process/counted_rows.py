"""Counts how often each row reaches a model, in two processes.

Keras 3.16 can divide the rows of several processes itself, as a strategy does;
a row that both divide would be left out, or used twice.
"""

import jax
import keras
import numpy as np

import keras_strategies as ks
from tests.support.optional import without_torch

SIZE = 8
# The replicas cannot share the last batch evenly.
ROWS = np.arange(1, 22, dtype="int32")[:, None]
NUM_IDS = len(ROWS) + 1


class Batches(keras.utils.PyDataset):
    def __init__(self, rows, **kwargs):
        super().__init__(**kwargs)
        self.rows = rows

    def __len__(self):
        return -(-len(self.rows) // SIZE)

    def __getitem__(self, index):
        rows = self.rows[index * SIZE : (index + 1) * SIZE]
        return rows, rows


def generate(rows):
    for start in range(0, len(rows), SIZE):
        batch = rows[start : start + SIZE]
        yield batch, batch


def make_tf_data(rows):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((rows, rows)).batch(SIZE)


def make_grain(rows):
    import grain

    items = [(row, row) for row in rows]
    return grain.MapDataset.source(items).batch(SIZE)


def make_torch(rows):
    import torch

    dataset = torch.utils.data.TensorDataset(*[torch.tensor(rows)] * 2)
    return torch.utils.data.DataLoader(dataset, batch_size=SIZE)


SOURCES = without_torch(
    {
        "arrays": lambda rows: {"x": rows, "y": rows, "batch_size": SIZE},
        "PyDataset": lambda rows: {"x": Batches(rows)},
        "PyDataset workers": lambda rows: {"x": Batches(rows, workers=2)},
        "generator": lambda rows: {"x": generate(rows)},
        "tf.data": lambda rows: {"x": make_tf_data(rows)},
        "grain": lambda rows: {"x": make_grain(rows)},
        "torch": lambda rows: {"x": make_torch(rows)},
    }
)


class Seen(keras.layers.Layer):
    """Remembers the rows that this process's replicas receive."""

    rows: list[int] = []

    def call(self, x):
        jax.debug.callback(self._see, x, ordered=False)
        return x

    @classmethod
    def _see(cls, x):
        cls.rows += np.asarray(x).ravel().astype(int).tolist()

    @classmethod
    def forget(cls):
        jax.effects_barrier()
        rows, cls.rows = cls.rows, []
        return rows


class Histogram(keras.metrics.Metric):
    """Counts how often each row was a target."""

    def __init__(self):
        super().__init__(name="histogram")
        self.counts = self.add_variable((NUM_IDS,), "zeros", name="counts")

    def update_state(self, y, outputs, sample_weight=None):
        del outputs, sample_weight
        hits = keras.ops.one_hot(keras.ops.reshape(y, (-1,)), NUM_IDS)
        self.counts.assign_add(keras.ops.sum(hits, axis=0))

    def result(self):
        return keras.ops.sum(self.counts)


def build():
    """Trained, its weights are minus the number of times of each row."""
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            Seen(),
            keras.layers.Embedding(NUM_IDS, 1, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
        ]
    )
    loss = keras.losses.MeanSquaredError(reduction="sum")
    loss.call = lambda y, outputs: keras.ops.sum(outputs, axis=-1)
    histogram = Histogram()
    model.compile(keras.optimizers.SGD(1.0), loss, metrics=[histogram])
    return model, histogram


def count(strategy=None):
    """By source: how often each row was trained and evaluated, the rows in the
    order of the predictions, and those that this process's replicas trained."""
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, histogram = build()
    (table,) = model.weights
    zeros = np.zeros((NUM_IDS, 1), "float32")
    found = {}
    for name, make in SOURCES.items():
        table.assign(zeros)
        Seen.forget()
        model.fit(**make(ROWS), shuffle=False, verbose=0)
        own = Seen.forget()
        trained = -np.asarray(table)[1:, 0]
        model.evaluate(**make(ROWS), verbose=0)
        evaluated = np.asarray(histogram.counts)[1:]
        table.assign(np.arange(NUM_IDS, dtype="float32")[:, None])
        data = make(ROWS)
        data.pop("y", None)
        predicted = model.predict(**data, verbose=0)
        found[name] = {
            "trained": trained.tolist(),
            "evaluated": evaluated.tolist(),
            "predicted": predicted.ravel().tolist(),
            "own": own,
        }
    return found
