"""Many steps on more virtual devices than cores: no hang, no abort.

Each run is a process of its own with a time limit; see
`keras_strategies/spmd/dispatch.py` for what could go wrong.

    ./run bench soak
    ./run bench soak --devices 8 --steps 2000 --repeats 5
"""

import argparse
import os
import subprocess
import sys
import time

ROWS_A_DEVICE = 2


def train(devices: int, steps: int) -> None:
    """In a process of its own: trains, and checks that all steps ran."""
    import keras
    import numpy as np

    import keras_strategies as ks
    from keras_strategies.testing import assert_replicated

    rows = ROWS_A_DEVICE * devices
    random = np.random.default_rng(0)
    x = random.normal(size=(rows * steps, 32)).astype("float32")
    y = random.integers(0, 10, len(x))
    strategy = ks.MirroredStrategy()
    assert strategy.num_replicas_in_sync == devices
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x, y, batch_size=rows, verbose=0)
    assert int(model.optimizer.iterations.value) == steps
    assert_replicated(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout-seconds", type=int, default=300)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.devices, options.steps)
        return
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    environment = dict(
        os.environ, XLA_FLAGS=flag, JAX_PLATFORMS="cpu", KERAS_BACKEND="jax"
    )
    command = [sys.executable, __file__, "--child"]
    command += ["--devices", str(options.devices)]
    command += ["--steps", str(options.steps)]
    for i in range(options.repeats):
        start = time.perf_counter()
        subprocess.run(
            command,
            env=environment,
            timeout=options.timeout_seconds,
            check=True,
        )
        seconds = time.perf_counter() - start
        print(
            f"run {i + 1} of {options.repeats}: {options.steps} steps on "
            f"{options.devices} devices in {seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
