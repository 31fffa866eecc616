"""Fits on sources of one's own, in several processes."""

import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.plain_keras import dense

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.normal(size=(22, 1)).astype("float32")


class Rows(ks.data.Source):
    """Rows in an order of each epoch, read by every process for itself.

    Args:
      process: Which process reads, where each has rows of its own.
    """

    batch_size = 8

    def __init__(self, process=None):
        self.is_process_local = process is not None
        self.num_batches = None if self.is_process_local else 3
        self._process = process
        self.asked = []

    def read(self, epoch, start, cut):
        order = np.random.default_rng(epoch).permutation(22)
        if self.is_process_local:
            order = order[self._process :: 2]
        for first in range(start * 8, len(order), 8):
            rows = order[first : first + 8]
            a, b = (0, len(rows)) if self.is_process_local else cut(len(rows))
            self.asked.append(b - a)
            data = X[rows[a:b]], Y[rows[a:b]]
            yield ks.data.Part(data=data, rows=len(rows))


def compiled():
    model = keras.Sequential([keras.Input((3,)), dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def fitted(is_process_local):
    """Weights after two epochs, and how many rows this process read."""
    import jax

    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled()
    source = Rows(jax.process_index() if is_process_local else None)
    history = model.fit(source, epochs=2, verbose=0).history
    assert_replicated(model)
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "loss": history["loss"],
        "read": sum(source.asked),
        "steps": int(model.optimizer.iterations),
    }
