"""TPUStrategy over the devices of several processes; run in each of them."""

import jax
import keras
import numpy as np

import keras_strategies as ks

LAYOUT = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def train(cores):
    """Trains on all devices, replicas of some cores; what this process has."""
    devices = jax.devices()
    topology = ks.tpu.experimental.Topology.from_devices(devices)
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, [cores, 1, 1, 1], num_replicas=len(devices) // cores
    )
    strategy = ks.TPUStrategy(device_assignment=assignment, layout_map=LAYOUT)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="relu", name="up"),
                keras.layers.Dense(3, name="down"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, epsilon=0.01), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 6)).astype("float32")
    y = rng.normal(size=(22, 3)).astype("float32")
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    total = strategy.reduce(
        "sum",
        strategy.run(lambda: keras.ops.sum(model.layers[0].kernel)),
        axis=None,
    )
    part = model.layers[0].kernel.value.addressable_shards[0].data
    return {
        "losses": history.history["loss"],
        "predictions": model.predict(x, verbose=0).tolist(),
        "evaluation": model.evaluate(x, y, verbose=0),
        "total": float(total),
        "replicas": strategy.num_replicas_in_sync,
        "local": len(strategy.experimental_local_results(model.layers[0].bias)),
        "part": list(part.shape),
    }
