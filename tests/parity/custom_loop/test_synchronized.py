"""BatchNormalization over the rows of all replicas, in a custom loop."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, mirrored

ROWS, STEPS = 24, 3
_random = np.random.default_rng(5)
X = _random.normal(2.0, 3.0, (ROWS, 5, 4)).astype("float32")
X[_random.random((ROWS, 5)) < 0.3] = 0.0
X[:4] = 0.0  # A replica of eight then has no entry that counts.
Y = _random.normal(size=(ROWS, 1)).astype("float32")


class Pool(keras.layers.Layer):
    """The mean over the steps, masked or not."""

    def call(self, inputs, mask=None):
        return keras.ops.mean(inputs, 1)

    def compute_mask(self, inputs, mask=None):
        return None


def built(is_masked, **kwargs):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5, 4)),
            *([keras.layers.Masking()] if is_masked else []),
            keras.layers.BatchNormalization(momentum=0.8, **kwargs),
            Pool(),
            keras.layers.Dense(1),
        ]
    )


def alone(is_masked, rows=ROWS):
    """Plain Keras on one device: its weights after some steps."""
    model = built(is_masked)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = X[:rows], Y[:rows]
    model.fit(x, y, batch_size=rows, epochs=STEPS, shuffle=False, verbose=0)
    return model.get_weights()


def batches(strategy, rows):
    """A dataset of one batch."""
    dataset = strategy.experimental_make_numpy_dataset((X[:rows], Y[:rows]))
    return strategy.experimental_distribute_dataset(dataset.batch(rows))


def made(strategy, is_masked, rows=ROWS):
    with strategy.scope():
        model = built(is_masked, synchronized=True)
        optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        def loss():
            return keras.ops.sum((model(x, training=True) - y) ** 2) / rows

        grads = ks.grad(loss, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)

    return model, step


def check(strategy, is_masked, rows=ROWS):
    model, step = made(strategy, is_masked, rows)
    batch = batches(strategy, rows)
    for _ in range(STEPS):
        strategy.run(step, next(iter(batch)))
    assert_same(model.get_weights(), alone(is_masked, rows), tolerance=2e-5)
    assert_replicated(model)


@pytest.mark.parametrize(
    ("replicas", "is_masked"), combine([1, 2, 3, 8], [False, True], every=4)
)
def test_moments_are_those_of_one_device(replicas, is_masked):
    check(mirrored(replicas), is_masked)


@pytest.mark.slow
def test_moments_are_the_same_in_debug_mode():
    strategy = mirrored(2)
    with strategy.debug():
        check(strategy, False)


@pytest.mark.parametrize(
    ("replicas", "is_masked"), combine([2, 3], [False, True], every=3)
)
def test_rows_that_do_not_divide_under_a_gradient(replicas, is_masked):
    check(mirrored(replicas), is_masked, 7)


def test_rows_that_do_not_divide_count_alike_without_a_gradient():
    strategy = mirrored(3)
    model, _ = made(strategy, False)
    (batch,) = batches(strategy, 7)
    strategy.run(lambda x, y: model(x, training=True), batch)
    expected = 0.2 * X[:7].mean((0, 1))
    assert_same(
        [model.layers[0].moving_mean.numpy()], [expected], tolerance=1e-5
    )
