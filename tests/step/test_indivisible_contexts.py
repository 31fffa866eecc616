"""Steps that use their replica context, on rows that replicas cannot share."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.models import compiled_in
from tests.support.plain_keras import mirrored

_random = np.random.default_rng(5)
X = _random.normal(size=(12, 3)).astype("float32")
Y = _random.normal(size=(12, 2)).astype("float32")


def context():
    return ks.get_replica_context()


def use_id():
    return context().replica_id_in_sync_group


def use_sum():
    return context().all_reduce("sum", 1.0)


class OwnStep(keras.Model):
    """Uses its replica context for some numbers of rows, without effect."""

    def __init__(self, use, for_rows):
        super().__init__()
        self.use, self.for_rows = use, for_rows
        self.net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.built = True

    def call(self, x):
        return self.net(x)

    def loss_of(self, x, y, y_pred):
        return ops.mean(ops.square(y_pred - y))

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data
        if self.for_rows is None or x.shape[0] in self.for_rows:
            self.use()

        def loss_of(weights):
            y_pred, _ = self.stateless_call(weights, others, x)
            return self.loss_of(x, y, y_pred)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"mse": loss}, (weights, others, slots, metrics)


class KerasLoss(OwnStep):
    def loss_of(self, x, y, y_pred):
        return keras.losses.MeanSquaredError()(y, y_pred)


class UsesId(OwnStep):
    """Its loss uses the id, but combines no values of replicas."""

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x, y, y_pred)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().loss_of(x, y, y_pred) + 0.0 * use_id()


def train(strategy, rows, make, *args):
    keras.utils.set_random_seed(1)
    model = compiled_in(
        strategy, lambda: make(*args), keras.optimizers.SGD(0.1)
    )
    options = {"batch_size": rows, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(X[:rows], Y[:rows], epochs=2, **options)
    return [history.history["mse"], *model.get_weights()]


def check(rows, replicas, make, *args):
    one = train(ks.OneDeviceStrategy("CPU:0"), rows, make, *args)
    ours = train(mirrored(replicas), rows, make, *args)
    for ours_, one_ in zip(ours, one, strict=True):
        np.testing.assert_allclose(ours_, one_, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("use", "for_rows"),
    combine([use_id, use_sum], [{5}, {4}, {5, 4}], every=3),
)
def test_a_context_that_the_global_batch_does_not_use(use, for_rows):
    check(9, 2, OwnStep, use, for_rows)


@pytest.mark.parametrize("make", [KerasLoss, UsesId])
def test_gradients_of_losses_are_weighted_by_rows(make):
    check(9, 2, make, use_id, None)


@pytest.mark.parametrize("for_rows", [None, {9}, {5, 9}])
def test_gradients_without_weights_are_refused(for_rows):
    with pytest.raises(ValueError, match="different numbers of rows"):
        train(mirrored(2), 9, OwnStep, use_id, for_rows)
    # Two replicas have one row each, and the others none.
    check(2, 3, OwnStep, use_id, None)


class Scale(keras.layers.Layer):
    """Uses its replica context for some numbers of rows, without effect."""

    def __init__(self, for_rows):
        super().__init__()
        self.for_rows = for_rows

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        if x.shape[0] in self.for_rows and not ks.in_cross_replica_context():
            x = x + 0.0 * use_sum()
        return x * self.scale


@pytest.mark.parametrize("for_rows", [{9}, {5, 4}, {5, 4, 9}, {5}, {4}])
def test_a_layer_that_uses_its_context_for_some_rows(for_rows):
    found = []
    for strategy in (mirrored(2), ks.OneDeviceStrategy("CPU:0")):
        keras.utils.set_random_seed(1)
        model = compiled_in(
            strategy,
            lambda: keras.Sequential([Scale(for_rows), keras.layers.Dense(2)]),
            keras.optimizers.SGD(0.1),
            "mse",
        )
        options = {"batch_size": 9, "shuffle": False, "verbose": 0}
        history = model.fit(X[:9], Y[:9], epochs=2, **options)
        loss = model.evaluate(X[:9], Y[:9], batch_size=9, verbose=0)
        found.append([history.history["loss"], loss, *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
