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
IMAGES = _random.random((ROWS, 8, 8, 2)).astype("float32")
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


class Contrastive(keras.losses.Loss):
    """A softmax over the rows; it does not know that it mixes them."""

    def call(self, y_true, y_pred):
        scores = ops.matmul(y_pred, ops.transpose(y_pred))
        total = ops.log(ops.sum(ops.exp(scores), axis=1))
        return total - ops.sum(y_pred * y_pred, axis=1)


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
    "sum_over_constant": lambda: with_loss(
        lambda x: ops.sum(ops.mean(x**2, axis=1)) / 24
    ),
    "norm": lambda: with_loss(lambda x: ops.sqrt(ops.sum(x**2))),
    "log_of_sum": lambda: with_loss(lambda x: ops.log(ops.sum(x**2))),
    "max_of_sums": lambda: with_loss(lambda x: ops.max(ops.sum(x**2, 0))),
    "running_sum": lambda: with_loss(
        lambda x: 0.01 * ops.mean(ops.square(ops.cumsum(x, axis=0)))
    ),
    "experts": lambda: chain((4,), dense(4), Experts(), dense(1)),
    "weighted_mean": lambda: with_loss(
        lambda x: ops.sum(x * ops.abs(x)) / (ops.sum(ops.abs(x)) + 1e-7)
    ),
    "gram": lambda: with_loss(
        lambda x: ops.mean(ops.matmul(ops.transpose(x), x))
    ),
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


def fitted(build, x=X, y=Y, *, loss="mse", replicas=None, compiled=(), **more):
    """Losses and weights, and whether it was said that they are no means."""

    def run():
        keras.utils.set_random_seed(2)
        model = build()
        model.compile("sgd", loss, **dict(compiled))
        given = {"batch_size": ROWS, "epochs": 3, "verbose": 0} | more
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
    ("name", "replicas"), combine(NO_MEANS, (2, 3), every=4)
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


def test_a_loss_that_mixes_rows_unknowingly():
    def build():
        return keras.Sequential([keras.Input((4,)), dense(3)])

    found, said = fitted(build, loss=Contrastive(), replicas=2)
    assert said
    assert_close(found, fitted(build, loss=Contrastive()))


def tokens(*more):
    return chain((6,), layers.Embedding(9, 8, mask_zero=True), *more)


def attention():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(inputs)
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def convolutional():
    return chain(
        (8, 8, 2),
        layers.RandomFlip(),
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.DepthwiseConv2D(3),
        layers.MaxPooling2D(),
        layers.SpatialDropout2D(0.2),
        layers.Flatten(),
        layers.Dense(3, activation="softmax"),
    )


class Autoencoder(keras.Model):
    """As in Keras's examples: losses added in `call`, and metrics."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(4)
        self.decoder = dense(4, seed=3)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        z = mean + ops.exp(0.5 * log_var) * noise
        loss = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        self.add_loss(ops.mean(ops.sum(loss, axis=1)))
        return self.decoder(ops.concatenate([z, z], -1))


WEIGHTS = _random.random(ROWS).astype("float32")
ORDINARY = {
    "mlp_sum": dict(
        build=lambda: keras.Sequential([keras.Input((4,)), dense(1)]),
        loss=keras.losses.MeanSquaredError(reduction="sum"),
    ),
    "mlp_weights": dict(
        build=lambda: keras.Sequential([keras.Input((4,)), dense(1)]),
        sample_weight=WEIGHTS,
        loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    ),
    "huber_bf16": dict(
        build=lambda: chain((4,), layers.Dense(1, dtype="mixed_bfloat16")),
        loss="huber",
    ),
    "lstm": dict(
        build=lambda: tokens(layers.LSTM(4), layers.Dense(3)),
        x=TOKENS,
        y=LABELS,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
    ),
    "gru_masked": dict(
        build=lambda: tokens(
            layers.Bidirectional(layers.GRU(4, return_sequences=True)),
            layers.Dense(6),
        ),
        x=TOKENS,
        y=TOKENS % 6,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    "attention": dict(
        build=attention,
        x=TOKENS,
        y=LABELS,
        loss="sparse_categorical_crossentropy",
    ),
    "convolutional": dict(
        build=convolutional,
        x=IMAGES,
        y=LABELS,
        loss="sparse_categorical_crossentropy",
    ),
    "dice": dict(
        build=lambda: chain((4,), dense(4, activation="sigmoid")),
        y=np.abs(X) % 1,
        loss="dice",
    ),
    "vae": dict(build=Autoencoder, y=X),
    "focal": dict(
        build=lambda: chain((4,), dense(1, activation="sigmoid")),
        y=(Y > 0).astype("float32"),
        loss="binary_focal_crossentropy",
        compiled=(("steps_per_execution", 2),),
    ),
}


@pytest.mark.parametrize("name", combine(ORDINARY, every=9))
def test_of_ordinary_models_nothing_is_said(name):
    _, said = fitted(replicas=2, **ORDINARY[name])
    assert not said


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
