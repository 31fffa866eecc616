"""No device and no host holds a whole model whose variables are divided.

200 MB of weights with Adam's slots, 600 MB in all, on 8 virtual devices, which
are one process here; in a process of its own, which gives large blocks back.
"""

import json
import os

import pytest

from tests.support.commands import python

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

def saved(model, directory):
    parts = {"model": model, "optimizer": model.optimizer}
    checkpoint = ks.checkpoint.Checkpoint(**parts)
    return ks.checkpoint.CheckpointManager(checkpoint, directory, keep=1)

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

maximum = {"resident": 0.0, "held": 0.0}
is_over = False

def watch():
    while not is_over:
        maximum["resident"] = max(maximum["resident"], resident())
        time.sleep(0.005)

def measured(work):
    # Growth of this process, and what a device holds afterwards.
    start = maximum["resident"] = resident()
    result = work()
    maximum["resident"] = max(maximum["resident"], resident())
    return result, [maximum["resident"] - start, held()]

with tempfile.TemporaryDirectory() as directory:
    manager = saved(built(64, 2), directory)
    manager.save()
    manager.restore_or_initialize()
threading.Thread(target=watch, daemon=True).start()
report = {}
model, report["build"] = measured(lambda: built(2048, 12))
with tempfile.TemporaryDirectory() as directory:
    manager = saved(model, directory)
    _, report["save"] = measured(manager.save)
    _, report["restore"] = measured(manager.restore_or_initialize)
rows = np.zeros((16, 2048), "float32")
program = strategy.compile_step(model, (rows, rows))
report["arguments"] = program.argument_bytes / 1e6
report["outputs"] = program.output_bytes / 1e6
print(json.dumps(report))
"""


GATHERED = """
import json
import jax, keras
import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.step.lower_step import lower_step

WIDTH, DEPTH = 512, 16
strategy = ks.MirroredStrategy(
    variable_partitioner=ks.experimental.FullySharded()
)
with strategy.scope():
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("adam", "mse")

def temporary(kind, steps):
    # MB on a device, of a program of so many steps.
    rows = jax.ShapeDtypeStruct((16, WIDTH), "float32")
    build = find_binding(model).build_for_shapes
    arguments = model, strategy.mesh, kind, (rows, rows), build, steps
    compiled = lower_step(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6

print(json.dumps({
    f"{kind} of {steps}": temporary(kind, steps)
    for kind in ("test", "predict")
    for steps in (1, 4)
}))
"""


@pytest.mark.slow
def test_building_saving_and_restoring():
    report = run(
        PROGRAM,
        MALLOC_MMAP_THRESHOLD_="1000000",
        MALLOC_TRIM_THRESHOLD_="1000000",
    )
    share = STATE_MB / DEVICES
    for name in ("build", "save", "restore"):
        growth, held = report[name]
        assert growth <= 1.3 * STATE_MB, (name, report)
        assert held <= share + LARGEST_MB, (name, report)
    # A batch of 16 rows, and biases that are whole.
    assert report["arguments"] <= share + 1
    assert report["outputs"] <= 1


@pytest.mark.slow
def test_evaluation_and_prediction_gather_one_layer_after_the_other():
    # As compilers for accelerators do it: on CPU XLA starts early what can be
    # started, and holds all weights.
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    report = run(GATHERED, flags=flag)
    # Of 16 layers of a megabyte.
    assert len(report) == 4
    assert all(megabytes < 3.2 for megabytes in report.values()), report


def run(program, flags="", **env):
    """What a program prints last, in a process of its own."""
    count = f"--xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{count} {flags}",
        **env,
    }
    done = python("-c", program, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
