"""Datasets that several loops read: each pass has an order of its own."""

import contextlib
import random

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.keras_bridge.keras_names import BUILDS_FIRST
from tests.support.combinations import combine
from tests.support.plain_keras import dense, mirrored

ROWS, SIZE = 24, 4
X = np.arange(ROWS, dtype="float32")[:, None]


def read_tf(seed):
    import tensorflow as tf

    tf.random.set_seed(None)
    return lambda directory: (
        tf.data.Dataset.from_tensor_slices(X).shuffle(ROWS, seed).batch(SIZE)
    )


def of_torch(seed):
    import torch

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return lambda directory: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(X)),
        batch_size=SIZE,
        shuffle=True,
        generator=generator,
    )


def read_files(seed):
    def make(directory):
        np.save(directory / "x.npy", X)
        return ks.data.files(
            [directory / "x.npy"],
            "npy",
            batch_size=SIZE,
            shuffle=True,
            seed=seed,
        )

    return make


def of_grain(seed):
    import grain

    return lambda directory: (
        grain.MapDataset.source(X).seed(seed).shuffle().batch(SIZE)
    )


SOURCES = {
    "tf.data": lambda: read_tf(None),
    "tf.data with a seed": lambda: read_tf(5),
    "torch": lambda: of_torch(None),
    "torch with a seed": lambda: of_torch(5),
    "files": lambda: read_files(None),
    "files with a seed": lambda: read_files(5),
    "grain": lambda: of_grain(5),
}


def predictor(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.ReLU()])
        model.compile()
    return model


@pytest.mark.filterwarnings("ignore:.*was passed, but is ignored")
@pytest.mark.parametrize(
    ("name", "is_distributed"), combine(SOURCES, [False, True], every=2)
)
def test_each_loop_shuffles_anew(name, is_distributed, tmp_path):
    strategy = mirrored(2)
    model = predictor(strategy)
    data = SOURCES[name]()(tmp_path)
    if is_distributed:
        data = strategy.experimental_distribute_dataset(data)
    orders = [model.predict(data, verbose=0)[:, 0].tolist() for _ in range(3)]
    if is_distributed:
        orders.append(
            [
                float(row)
                for batch in data
                for value in jax.tree.leaves(
                    batch, is_leaf=lambda v: isinstance(v, ks.PerReplica)
                )[0].values
                for row in np.asarray(value)[:, 0]
            ]
        )
    for order in orders:
        assert sorted(order) == X[:, 0].tolist()
    assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("name", ["tf.data", "torch", "files"])
def test_the_random_state_tells_the_orders(name, tmp_path):
    model = predictor(mirrored(2))

    def orders(seed):
        np.random.seed(seed)
        return [
            model.predict(SOURCES[name]()(tmp_path), verbose=0).tolist()
            for _ in range(2)
        ]

    first = orders(1)
    assert first[0] != first[1]
    assert orders(1) == first
    assert orders(2) != first


def test_another_dataset_begins_anew(tmp_path):
    model = predictor(mirrored(2))
    orders = [
        model.predict(read_files(5)(tmp_path), verbose=0).tolist()
        for _ in range(2)
    ]
    assert orders[0] == orders[1]


class Changing(keras.utils.PyDataset):
    """One batch more, or fewer, after each epoch."""

    def __init__(self, change):
        super().__init__()
        self.size, self.change, self.asked = 4, change, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked.append(index)
        return X[index : index + 1], X[index : index + 1]

    def on_epoch_end(self):
        self.size += self.change
        self.asked.append("end")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("change", combine([1, -1], every=2))
def test_a_pydataset_may_change_its_length(change):
    def trained(scope):
        random.seed(3)
        data = Changing(change)
        with scope:
            model = keras.Sequential([keras.Input((1,)), dense()])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(data, epochs=3, shuffle=True, verbose=0)
        assert max(filter(lambda i: i != "end", data.asked)) < 7
        return np.asarray(model.get_weights()[0]), data.asked

    expected, plain = trained(contextlib.nullcontext())
    actual, asked = trained(mirrored(2).scope())
    # The order of the steps decides on the weights.
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    if change < 0:
        # The batch that Keras 3.16 builds on is of an order of its own.
        first = asked.index("end") if BUILDS_FIRST else 0
        assert asked[first:] == plain[first:]
