"""Batches that lie on the devices already: left where they are."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.fit.inputs.feed import make_feed
from keras_strategies.spmd.mesh import ReplicaMesh
from tests.support.combinations import combine
from tests.support.plain_keras import dense

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1] * 2


class Batches(keras.utils.PyDataset):
    def __init__(self, batch, count=3):
        super().__init__()
        self.batch, self.count = batch, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.batch


def generator(batch, count=3):
    for _ in range(count):
        yield batch


def mesh():
    return ReplicaMesh(devices=tuple(jax.devices()[:2]))


@pytest.mark.parametrize("kind", [Batches, generator])
def test_placed_batches_are_not_moved(kind):
    batch = jax.device_put((X, Y), mesh().split)
    feed = make_feed(mesh(), x=kind(batch))
    feed.on_epoch_begin()
    executions = list(feed.get_jax_iterator())
    feed.on_epoch_end()
    assert len(executions) == 3
    for execution in executions:
        (segment,) = execution.segments
        assert segment.data[0] is batch[0]
        assert segment.data[1] is batch[1]


@pytest.mark.parametrize(
    ("places", "steps_per_execution"),
    combine(["split", "whole", "others", "one"], [1, 2], every=3),
)
def test_fit_is_the_same_wherever_batches_lie(places, steps_per_execution):
    others = ReplicaMesh(devices=tuple(jax.devices()[2:6]))
    place = {
        "split": mesh().split,
        "whole": mesh().whole,
        "others": others.split,
        "one": jax.devices()[1],
    }[places]
    losses = []
    for batch in (X, Y), jax.device_put((X, Y), place):
        with ks.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = keras.Sequential([keras.Input((3,)), dense(1)])
            model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        history = model.fit(Batches(batch), shuffle=False, verbose=0)
        losses.append(history.history["loss"])
        losses.append([model.train_on_batch(*batch)])
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-6)
