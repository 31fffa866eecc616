"""Training with a loss of the whole batch, wherever a model may have it."""

import functools
import warnings

import jax
import keras
import numpy as np
from keras import ops

import keras_strategies as ks
from tests.support.plain_keras import mirrored

ROWS, BATCH, FEATURES, OUTPUTS = 48, 24, 6, 3
WORDS = "its loss is not a mean over the batch's rows"
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, FEATURES)).astype("float32")
Y = _random.uniform(0.2, 1.5, size=(ROWS, OUTPUTS)).astype("float32")


def net():
    keras.utils.set_random_seed(1)
    return [keras.layers.Dense(8, "tanh"), keras.layers.Dense(OUTPUTS)]


class Given(keras.losses.Loss):
    def __init__(self, fn):
        super().__init__()
        self.fn_of_batch = fn

    def call(self, y_true, y_pred):
        return self.fn_of_batch(y_true, y_pred)


class Computes(keras.Model):
    """Has a `compute_loss` of its own."""

    def __init__(self, fn):
        super().__init__()
        self.parts, self.fn = net(), fn

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(self.fn(y, y_pred))


class Adds(Computes):
    """Adds the loss where it is called; the target is made of the input."""

    def call(self, x):
        outputs = super().call(x)
        target = 0.5 + ops.abs(x[:, :OUTPUTS])
        self.add_loss(ops.mean(self.fn(target, outputs)))
        return outputs

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.sum(ops.stack(self.losses))


class Steps(Computes):
    """Has a train step of its own, which calls its `compute_loss`."""

    def loss_of(self, x, y, y_pred):
        return self.compute_loss(x, y, y_pred)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(weights):
            y_pred, _ = self.stateless_call(weights, others, x)
            return self.loss_of(x, y, y_pred)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"own": loss}, (weights, others, slots, metrics)


def build_function_case(fn, loss=None):
    return keras.Sequential([keras.Input((FEATURES,)), *net()]), loss or fn


PLACES = {
    "function": build_function_case,
    "class": lambda fn: build_function_case(fn, Given(fn)),
    "compute_loss": lambda fn: (Computes(fn), None),
    "add_loss": lambda fn: (Adds(fn), None),
    "train_step": lambda fn: (Steps(fn), None),
}


def train(strategy, fn, place):
    """Trains a model: its losses, its weights and the warnings."""
    with strategy.scope():
        model, loss = PLACES[place](fn)
        model.compile(keras.optimizers.SGD(0.02), loss)
        if not model.built:
            model(X[:BATCH])
    options = {"batch_size": BATCH, "verbose": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(X, Y, epochs=2, shuffle=False, **options).history
    losses = history.get("own", history.get("loss"))
    told = [str(w.message) for w in caught if WORDS in str(w.message)]
    return losses, model.get_weights(), told


@functools.cache
def of_one_device(fn, place):
    return train(ks.OneDeviceStrategy("CPU:0"), fn, place)[:2]


def check(fn, place, replicas):
    """Checks that a loss trains as on one device, with one warning."""
    losses, weights, told = train(mirrored(replicas), fn, place)
    expected_losses, expected = of_one_device(fn, place)
    np.testing.assert_allclose(losses, expected_losses, rtol=3e-5, atol=3e-5)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
    assert len(told) == 1
