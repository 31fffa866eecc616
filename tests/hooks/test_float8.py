"""float8: scales and histories of several replicas are those of one device."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.combinations import few
from tests.support.plain_keras import mirrored

ROWS, STEPS = 12, 3
_random = np.random.default_rng(0)
# Rows of different sizes: the largest ones are on the last replica.
X = (
    _random.normal(size=(ROWS * STEPS, 8))
    * np.geomspace(0.1, 5, ROWS * STEPS)[:, None]
)
Y = _random.normal(size=(ROWS * STEPS, 4))


def trained(strategy=None, rows=ROWS):
    """Losses, weights, and by name the scales and histories."""
    keras.utils.set_random_seed(3)

    def build():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(4),
            ]
        )
        for layer in model.layers:
            layer.quantize("float8")
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    if strategy is None:
        model = build()
    else:
        with strategy.scope():
            model = build()
    x, y = X.astype("float32"), Y.astype("float32")
    history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    ks.testing.assert_replicated(model)
    values = [(v.name, np.asarray(v, "float32")) for v in model.variables]
    return history.history["loss"], values


def sharded(replicas):
    devices = [f"CPU:{i}" for i in range(replicas)]
    shards = ks.experimental.FullySharded(min_size=1)
    return ks.MirroredStrategy(devices, variable_partitioner=shards)


@pytest.mark.parametrize(
    ("make", "replicas", "rows"),
    few([(mirrored, 2, 12), (mirrored, 3, 7), (sharded, 3, 12)], every=3),
)
def test_scales_and_histories_are_those_of_one_device(make, replicas, rows):
    losses, values = trained(make(replicas), rows)
    expected_losses, expected = trained(rows=rows)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-2)
    for (name, value), (_, other) in zip(values, expected, strict=True):
        is_weight = name in ("kernel", "bias")
        tolerance = 3e-2 if is_weight else 2e-3
        np.testing.assert_allclose(
            value, other, rtol=tolerance, atol=tolerance, err_msg=name
        )
        assert is_weight or np.any(value)
