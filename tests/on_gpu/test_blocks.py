"""Blocks in one loop on a GPU, whose weights stay stacked in `fit`."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

pytestmark = pytest.mark.on_gpu

WIDTH, ROWS = 32, 40


def fit(devices, *, is_scanned):
    keras.utils.set_random_seed(1)
    with ks.MirroredStrategy(devices).scope():
        x = inputs = keras.Input((WIDTH,))
        for _ in range(6):
            x = layers.Add()([x, layers.Dense(WIDTH, "tanh")(x)])
        model = keras.Model(inputs, layers.Dense(4)(x))
        if is_scanned:
            ks.experimental.scan_blocks(model)
        optimizer = keras.optimizers.AdamW(0.003, global_clipnorm=1.0)
        model.compile(optimizer, "mse")
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(ROWS, n)).astype("float32") for n in (WIDTH, 4))
    for _ in range(2):
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, epochs=2, **options).history
    variables = [*model.variables, *model.optimizer.variables]
    return history["loss"], [np.asarray(v) for v in variables]


def test_a_model_has_the_numbers_of_a_cpu():
    found = fit(jax.devices("gpu")[:1], is_scanned=True)
    unrolled = fit(jax.devices("gpu")[:1], is_scanned=False)
    expected = fit(jax.devices("cpu")[:2], is_scanned=False)
    for other in (unrolled, expected):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3),
            *(found, other),
        )
