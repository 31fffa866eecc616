"""Steps with JAX's older partitioner, GSPMD, equal those of one device."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks


@pytest.fixture(autouse=True)
def _use_gspmd():
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def make_strategy(name):
    sharded = ks.experimental.FullySharded(min_size=1)
    if name == "mirrored":
        return ks.MirroredStrategy()
    if name == "fully sharded":
        return ks.MirroredStrategy(variable_partitioner=sharded)
    topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
    return ks.TPUStrategy(
        device_assignment=ks.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=[2, 1, 1, 1], num_replicas=4
        ),
        layout_map={".*hidden/kernel": (None, "model")},
        variable_partitioner=sharded if "sharded" in name else None,
    )


def train(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "relu", name="hidden"),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(4),
            ]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(37, 8)).astype("float32")
    history = model.fit(
        x, x[:, :4], batch_size=16, epochs=2, verbose=0, shuffle=False
    )
    return [
        np.asarray(history.history["loss"]),
        model.predict(x, verbose=0),
        *map(np.asarray, model.get_weights()),
    ]


@pytest.mark.parametrize(
    "name", ["mirrored", "fully sharded", "cores", "cores, sharded"]
)
def test_gspmd_equals_one_device(name):
    results = train(make_strategy(name))
    for one, other in zip(
        results, train(ks.OneDeviceStrategy("cpu:0")), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
