"""No device and no host holds a whole model whose variables are divided.

200 MB of weights with Adam's slots, 600 MB in all, on 8 virtual devices, which
are one process here; in a process of its own, which gives large blocks back.
"""

import json
import os
import subprocess
import sys

import pytest

STATE_MB, LARGEST_MB, DEVICES = 604.5, 16.8, 8
PROGRAM = """
import json, sys, tempfile, threading, time
import jax, keras, numpy as np
import keras_strategies as ks

strategy = ks.MirroredStrategy(
    variable_partitioner=ks.experimental.FullySharded()
)

def built(width, depth):
    with strategy.scope():
        layers = [keras.layers.Dense(width, "tanh") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model

def saved(model, folder):
    parts = {"model": model, "optimizer": model.optimizer}
    checkpoint = ks.checkpoint.Checkpoint(**parts)
    return ks.checkpoint.CheckpointManager(checkpoint, folder, keep=1)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

def held():
    # Bytes of a device's arrays; views of one buffer count once.
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            place = shard.device.id, shard.data.unsafe_buffer_pointer()
            found[place] = shard.data.nbytes
    devices = {device for device, _ in found}
    return max(
        sum(n for (d, _), n in found.items() if d == device)
        for device in devices
    ) / 1e6

most = {"resident": 0.0, "held": 0.0}
is_over = False

def watch():
    while not is_over:
        most["resident"] = max(most["resident"], resident())
        time.sleep(0.005)

def measured(work):
    # Growth of this process, and what a device holds afterwards.
    start = most["resident"] = resident()
    result = work()
    time.sleep(0.02)
    return result, [most["resident"] - start, held()]

with tempfile.TemporaryDirectory() as folder:
    manager = saved(built(64, 2), folder)
    manager.save()
    manager.restore_or_initialize()
threading.Thread(target=watch, daemon=True).start()
report = {}
model, report["build"] = measured(lambda: built(2048, 12))
with tempfile.TemporaryDirectory() as folder:
    manager = saved(model, folder)
    _, report["save"] = measured(manager.save)
    _, report["restore"] = measured(manager.restore_or_initialize)
rows = np.zeros((16, 2048), "float32")
program = strategy.compile_step(model, (rows, rows))
report["arguments"] = program.argument_bytes / 1e6
report["outputs"] = program.output_bytes / 1e6
print(json.dumps(report))
"""


@pytest.mark.slow
def test_building_saving_and_restoring():
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "MALLOC_MMAP_THRESHOLD_": "1000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    share = STATE_MB / DEVICES
    for name in ("build", "save", "restore"):
        growth, held = report[name]
        assert growth <= 1.3 * STATE_MB, (name, report)
        assert held <= share + LARGEST_MB, (name, report)
    # A batch of 16 rows, and biases that are whole.
    assert report["arguments"] <= share + 1
    assert report["outputs"] <= 1
