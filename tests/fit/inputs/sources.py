"""Models and data that the tests of data sources share."""

import keras
import numpy as np
from keras import ops

from tests.support.plain_keras import dense

ROWS = 22
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 3)).astype("float32")
X2 = _random.normal(size=(ROWS, 2)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")
Y2 = _random.normal(size=(ROWS, 2)).astype("float32")
W = _random.uniform(0.1, 2, size=ROWS).astype("float32")
LABELS = _random.integers(0, 3, size=ROWS)

REGRESSION = {
    "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "loss": "mse",
    "metrics": lambda: ["mae"],
    "weighted_metrics": lambda: ["mse"],
}
CLASSES = REGRESSION | {
    "loss": "sparse_categorical_crossentropy",
    "metrics": lambda: ["accuracy"],
    "weighted_metrics": lambda: ["accuracy"],
}
NO_LOSS = {"optimizer": REGRESSION["optimizer"]}
TWO_OUTPUTS = {
    "optimizer": REGRESSION["optimizer"],
    "loss": {"p": "mse", "q": "mae"},
    "metrics": lambda: {"p": ["mae"], "q": ["mse"]},
}


def one_input():
    return keras.Sequential(
        [keras.Input((3,)), dense(4, activation="tanh"), dense(1, seed=2)]
    )


def not_built():
    return keras.Sequential([dense(4, activation="tanh"), dense(1, seed=2)])


def classifier():
    return keras.Sequential([keras.Input((3,)), dense(3, activation="softmax")])


def _two_inputs(wrap):
    a = keras.Input((3,), name="a")
    b = keras.Input((2,), name="b")
    joined = keras.layers.concatenate([a, b])
    return keras.Model(wrap(a, b), dense(1)(joined))


def list_inputs():
    return _two_inputs(lambda a, b: [a, b])


def tuple_inputs():
    return _two_inputs(lambda a, b: (a, b))


def dict_inputs():
    return _two_inputs(lambda a, b: {"a": a, "b": b})


def dict_in_dict_out():
    a = keras.Input((3,), name="a")
    b = keras.Input((2,), name="b")
    joined = keras.layers.concatenate([a, b])
    outputs = {
        "p": dense(1, name="p")(joined),
        "q": dense(2, seed=2, name="q")(joined),
    }
    return keras.Model({"a": a, "b": b}, outputs)


@keras.saving.register_keras_serializable("tests")
class OwnLoss(keras.layers.Layer):
    """Adds the mean square of its input as a loss."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs - 1)))
        return inputs


def without_targets():
    return keras.Sequential([keras.Input((3,)), dense(2), OwnLoss()])


class Pairs(keras.utils.PyDataset):
    """Batches of rows of arrays; counts the calls Keras makes."""

    def __init__(self, *arrays, batch=8, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays
        self.batch = batch
        self.begun = 0
        self.ended = 0

    def __len__(self):
        return -(-len(self.arrays[0]) // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return tuple(a[rows] for a in self.arrays)

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def batches_of(*arrays, batch=8):
    for start in range(0, len(arrays[0]), batch):
        yield tuple(a[start : start + batch] for a in arrays)


def infinite(*arrays, batch=8):
    while True:
        yield from batches_of(*arrays, batch=batch)


def reusing_its_buffer(*, is_shared=False):
    """Batches in the same two arrays, of which a device may share the memory.

    If it may, plain Keras, which runs ahead, computes now and then with the
    rows of a later batch. JAX shares what lies at a multiple of 64 bytes.
    """
    x, y = (
        placed_at(0 if is_shared else 4, (8, columns)) for columns in (3, 1)
    )
    while True:
        for start in (0, 8, 14):
            x[:] = X[start : start + 8]
            y[:] = Y[start : start + 8]
            yield x, y


def placed_at(offset, shape):
    """An array of float32, so many bytes after a multiple of 64."""
    memory = np.empty(4 * np.prod(shape) + 128, "uint8")
    start = -memory.ctypes.data % 64 + offset
    return (
        memory[start : start + 4 * np.prod(shape)]
        .view("float32")
        .reshape(shape)
    )


def tf_data(*arrays):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays)


def dict_tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(
        ({"a": X, "b": X2}, {"p": Y, "q": Y2})
    ).batch(8)


def fit(**factories):
    """Fits on fresh data and returns the history, by name."""

    def act(model):
        arguments = {
            key: value() if callable(value) else value
            for key, value in factories.items()
        }
        arguments.setdefault("epochs", 2)
        return model.fit(verbose=0, **arguments).history

    return act
