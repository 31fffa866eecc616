"""Averages of weights (`use_ema=True`) that `load_weights` reads."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.estimator import Estimator
from tests.estimator import models
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored

_random = np.random.default_rng(0)
X = _random.normal(size=(8, 3)).astype("float32")
Y = _random.normal(size=(8, 1)).astype("float32")
EPOCHS = 3


def sgd(**kwargs):
    return keras.optimizers.SGD(0.2, momentum=0.5, use_ema=True, **kwargs)


OPTIMIZERS = {
    "sgd": sgd,
    "overwriting": lambda: sgd(ema_overwrite_frequency=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(sgd()),
}


def make_model():
    keras.utils.set_random_seed(1)
    frozen = keras.layers.Dense(3, trainable=False)
    # Layers of one name, which the saved names number.
    same = [keras.layers.Dense(3, name="same") for _ in range(2)]
    inner = [
        keras.Sequential([layer], name=f"in_{i}")
        for i, layer in enumerate(same)
    ]
    return keras.Sequential(
        [
            keras.Input((3,)),
            frozen,
            keras.layers.BatchNormalization(),
            *inner,
            keras.layers.Dense(1),
        ],
        name="model",
    )


def fitted(optimizer, callbacks=(), strategy=None, epochs=EPOCHS):
    with (strategy or mirrored(2)).scope():
        model = make_model()
        model.compile(optimizer, "mse")
    model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model.get_weights()


def loaded(directory, **kwargs):
    model = make_model()
    ks.checkpoint.load_weights(model, directory, **kwargs)
    return model.get_weights()


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def differ(ours, others):
    return any(
        not np.allclose(one, other)
        for one, other in zip(ours, others, strict=True)
    )


@pytest.mark.parametrize("name", combine(OPTIMIZERS, every=3))
def test_weights_are_those_that_the_fitted_model_has(tmp_path, name):
    saving = [ks.callbacks.Checkpoint(tmp_path)]
    weights = fitted(OPTIMIZERS[name](), saving)
    assert_equal(loaded(tmp_path), weights)
    after_one = fitted(OPTIMIZERS[name](), epochs=1)
    assert_equal(loaded(tmp_path, step=2), after_one)
    raw = loaded(tmp_path, averages=False)
    assert differ(raw, weights) == (name != "overwriting")


def test_weights_that_the_replicas_divide(tmp_path):
    strategy = ks.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2"],
        variable_partitioner=ks.experimental.FullySharded(min_size=1),
    )
    saving = [ks.callbacks.Checkpoint(tmp_path)]
    weights = fitted(sgd(), saving, strategy)
    assert_equal(loaded(tmp_path), weights)


def test_weights_that_a_callback_has_swapped_with_their_averages(tmp_path):
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    weights = fitted(sgd(), [swap, ks.callbacks.Checkpoint(tmp_path)])
    assert_equal(loaded(tmp_path), weights)
    for step, epochs in ((2, 1), (4, 2)):
        assert_equal(loaded(tmp_path, step=step), fitted(sgd(), epochs=epochs))


def test_weights_without_averages_are_as_before(tmp_path):
    optimizer = keras.optimizers.SGD(0.2)
    weights = fitted(optimizer, [ks.callbacks.Checkpoint(tmp_path)])
    for averages in (True, False):
        assert_equal(loaded(tmp_path, averages=averages), weights)


def test_a_managers_checkpoint_has_the_weights_that_were_saved(tmp_path):
    model = make_model()
    model.compile(sgd(), "mse")
    model.train_on_batch(X, Y)
    model.train_on_batch(X, Y)
    ks.checkpoint.Checkpoint(model=model).save(tmp_path / "ckpt")
    for averages in (True, False):
        assert_equal(loaded(tmp_path, averages=averages), model.get_weights())


def test_an_estimator_predicts_with_averages(tmp_path):
    def model_fn(features, labels):
        model = make_model()
        model.compile(sgd(), "mse")
        return model

    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    for _ in range(2):
        estimator.train(lambda: (X, Y))
    plain = make_model()
    ks.checkpoint.load_weights(plain, tmp_path)
    expected = plain.predict(X, verbose=0)
    found = np.stack(list(estimator.predict(lambda: X)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    loss = estimator.evaluate(lambda: (X, Y))["loss"]
    np.testing.assert_allclose(loss, np.mean((expected - Y) ** 2), rtol=1e-5)
    raw = loaded(tmp_path, averages=False)
    assert differ(raw, plain.get_weights())
