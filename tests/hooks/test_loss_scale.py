"""Losses that are no means over the rows, and those that are."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.support.combinations import combine
from tests.support.models import chain
from tests.support.plain_keras import dense, mirrored

_random = np.random.default_rng(0)
ROWS = 24
X = _random.normal(size=(ROWS, 4)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")
LABELS = _random.integers(0, 3, ROWS)
TOKENS = _random.integers(1, 9, (ROWS, 6))
WORDS = "its loss is not a mean over the batch's rows"


class Adds(layers.Layer):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def call(self, x):
        self.add_loss(self.of(x))
        return x


def with_loss(of):
    return keras.Sequential([keras.Input((4,)), dense(3), Adds(of), dense(1)])


class Recommender(keras.Model):
    """As in Keras's example on movielens: contracts over the rows, too."""

    def __init__(self):
        super().__init__()
        self.users = layers.Embedding(9, 4, embeddings_initializer="uniform")
        self.bias = layers.Embedding(9, 1)

    def call(self, inputs):
        user, movie = self.users(inputs[:, 0]), self.users(inputs[:, 1])
        dot = ops.tensordot(user, movie, 2)
        return ops.sigmoid(dot + self.bias(inputs[:, 0]))


def kl(x):
    return -0.5 * (1 + x - ops.square(x) - ops.exp(x))


class Experts(layers.Layer):
    """Rows are sent to experts by their places, which are counted."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = dense(2), dense(3, seed=4)

    def call(self, x):
        chance = ops.softmax(self.gate(x))
        mask = ops.one_hot(ops.argmax(chance, axis=-1), 2)
        place = ops.cast(ops.cumsum(mask, axis=0) * mask - 1, "int32")
        sent = ops.one_hot(place, ROWS) * mask[..., None]
        outputs = self.expert(ops.einsum("nec,nd->ecd", sent, x))
        return ops.einsum("nec,ecd->nd", sent * chance[..., None], outputs)


NO_MEANS = {
    "sum": lambda: with_loss(lambda x: 0.1 * ops.sum(x**2)),
    "sum_kl": lambda: with_loss(lambda x: ops.sum(kl(x))),
    "experts": lambda: chain((4,), dense(4), Experts(), dense(1)),
}
MEANS = {
    "running_sums_within_rows": lambda: with_loss(
        lambda x: ops.mean(ops.square(ops.cumsum(x, axis=1)))
    ),
    "mean": lambda: with_loss(lambda x: 0.1 * ops.mean(x**2)),
    "mean_kl": lambda: with_loss(lambda x: ops.mean(ops.sum(kl(x), axis=1))),
    "sum_over_rows": lambda: with_loss(
        lambda x: ops.sum(x**2) / ops.cast(ops.shape(x)[0], x.dtype)
    ),
    "mean_of_maxima": lambda: with_loss(lambda x: ops.mean(ops.max(x, 1))),
    "regularized": lambda: chain(
        (4,),
        dense(3, kernel_regularizer="l2", activity_regularizer="l2"),
        dense(1, bias_regularizer="l1"),
    ),
    "norms": lambda: chain(
        (4,),
        layers.BatchNormalization(),
        dense(4),
        layers.LayerNormalization(),
        layers.UnitNormalization(),
        layers.GaussianNoise(0.1),
        layers.Dropout(0.1),
        dense(1),
    ),
    "weight": lambda: with_loss(lambda x: ops.convert_to_tensor(0.3)),
}


def fitted(build, x=X, y=Y, *, replicas=None):
    """Losses and weights, and whether it was said that they are no means."""

    def run():
        keras.utils.set_random_seed(2)
        model = build()
        model.compile("sgd", "mse")
        given = {"batch_size": ROWS, "epochs": 3, "verbose": 0}
        history = model.fit(x, y, shuffle=False, **given).history["loss"]
        found = [history, model.evaluate(x, y, batch_size=ROWS, verbose=0)]
        return found + model.get_weights()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if replicas is None:
            return run()
        with mirrored(replicas).scope():
            found = run()
    said = [str(w.message) for w in caught if WORDS in str(w.message)]
    return found, said


def assert_close(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "replicas"), combine(NO_MEANS, (2, 3), every=2)
)
def test_a_loss_that_is_no_mean_is_exact_and_said_once(name, replicas):
    build = NO_MEANS[name]
    found, said = fitted(build, replicas=replicas)
    assert_close(found, fitted(build))
    # Once for each of fit and evaluate.
    assert len(said) == 2
    assert "ops.mean" in said[0]


@pytest.mark.parametrize("name", combine(MEANS, every=3))
def test_of_means_nothing_is_said(name):
    found, said = fitted(MEANS[name], replicas=2)
    assert not said
    if name == "norms":
        # Of each replica's own rows, as documented.
        return
    assert_close(found, fitted(MEANS[name]))


def test_contracting_over_the_rows_as_in_the_movielens_example():
    x, y = TOKENS[:, :2], (LABELS > 0).astype("float32")[:, None]
    found, said = fitted(Recommender, x, y, replicas=2)
    assert len(said) == 2
    assert_close(found, fitted(Recommender, x, y))


def test_a_number_of_rows_that_is_also_a_width():
    """Twelve rows a replica, and twelve entries a row."""

    def build():
        return chain(
            (12,),
            dense(12, activation="relu"),
            Adds(lambda x: ops.mean(ops.sum(x**2, axis=1) / 12)),
            dense(12),
            dense(1),
        )

    x = _random.normal(size=(24, 12)).astype("float32")
    found, said = fitted(build, x, replicas=2)
    assert not said
    assert_close(found, fitted(build, x))
