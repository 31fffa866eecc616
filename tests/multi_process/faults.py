"""One process of a job in which something goes wrong; see `test_faults`.

A script: python -m tests.multi_process.faults '{"case": ..., ...}'. It prints
a line for each step, and "fault" when it does what is wrong itself.
"""

import json
import subprocess
import sys
import threading
import time
import warnings

import jax
import keras
import numpy as np
from jax._src import compiler, distributed, xla_bridge

import keras_strategies as ks
from keras_strategies.watchdog import watchdog

AT = 8  # The step of what goes wrong.
STEPS = 400
SECONDS_A_STEP = 0.03

warnings.filterwarnings("ignore", ".shuffle=True. was passed")


def say(*words):
    print(*words, f"at {time.time():.3f}", flush=True)


def me():
    return jax.process_index()


# Connects to JAX's service in a process's place.
STRANGER = """
import sys
from jax._src.lib import _jax
place = _jax.get_distributed_runtime_client(
    sys.argv[1], int(sys.argv[2]), init_timeout=2, use_compression=True
)
place.connect()
"""


def let_a_stranger_in(process):
    address = distributed.global_state.coordinator_address
    words = [sys.executable, "-c", STRANGER, address, str(process)]
    subprocess.Popen(words, stderr=subprocess.DEVNULL)


class Trouble(Exception):
    """The user's own."""


def go_wrong(case, process):
    """What one process does in its step AT."""
    if me() != process:
        return
    say("fault")
    if case == "exception":
        raise Trouble("user bug")
    if case == "stranger":
        let_a_stranger_in(process)
    if case == "exit":
        sys.exit(3)
    if case == "interrupt":
        raise KeyboardInterrupt
    if case == "stuck":
        time.sleep(600)


def break_devices():
    """JAX cannot start the devices of this process."""

    def fail(platform):
        say("fault")
        raise RuntimeError(f"a broken {platform}")

    xla_bridge._init_backend = fail


class Steps(keras.callbacks.Callback):
    """Says each step; goes wrong in one, or stops there."""

    def __init__(self, case, process):
        super().__init__()
        self.case, self.process = case, process
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        say("step", self.count)
        time.sleep(SECONDS_A_STEP)
        if self.count != AT:
            return
        if self.case == "stop_training":
            if me() == self.process:
                say("fault")
                self.model.stop_training = True
        elif self.case != "early":
            go_wrong(self.case, self.process)


def model_of(strategy, layers=()):
    with strategy.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    return model


class Slow(keras.layers.Layer):
    """Takes long to trace in one process, once it trains."""

    def __init__(self, process, seconds):
        super().__init__()
        self.process, self.seconds = process, seconds

    def call(self, inputs, training=False):
        if training and me() == self.process:
            say("fault")
            time.sleep(self.seconds)
        return inputs


def fit(case, process):
    strategy = ks.MultiWorkerMirroredStrategy()
    layers = [Slow(process, 9.0)] if case == "compiles" else []
    model = model_of(strategy, layers)
    x = np.ones((8 * STEPS, 3), "float32")
    y = np.ones((8 * STEPS, 1), "float32")
    if case == "compiles":
        x, y = x[:160], y[:160]
    steps = Steps(case, process)
    try:
        model.fit(
            x, y, batch_size=8, shuffle=False, callbacks=[steps], verbose=0
        )
    finally:
        # What a `finally` block may do: look at the model, save it.
        if case == "term":
            weight = float(np.sum(model.get_weights()[0]))
            iterations = int(model.optimizer.iterations)
            say("stopped", steps.count, iterations, f"{weight:.6f}")


def loop(case, process):
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
    count = 0

    def step(values):
        variable.assign_add(values)
        return values.sum()

    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(3, "float32")
    )
    try:
        for count in range(1, STEPS):
            per_replica = strategy.run(step, (values,))
            float(strategy.reduce("sum", per_replica, axis=None))
            say("step", count)
            time.sleep(SECONDS_A_STEP)
            if count == AT:
                if case == "early" and me() == process:
                    say("fault")
                    break
                go_wrong(case, process)
    finally:
        if case == "term":
            say("stopped", count, float(np.sum(np.asarray(variable))))


def compile_slowly(case, process):
    """One process's compiler takes long; the others wait, but run nothing."""
    strategy = ks.MultiWorkerMirroredStrategy()
    real = compiler.backend_compile_and_load

    def slow(*args, **kwargs):
        if me() == process:
            say("fault")
            time.sleep(9.0)
        return real(*args, **kwargs)

    def step():
        return ks.get_replica_context().all_reduce("sum", np.ones(3, "float32"))

    compiler.backend_compile_and_load = slow
    result = strategy.run(step)
    compiler.backend_compile_and_load = real
    say("started")
    data = strategy.experimental_make_numpy_dataset(np.ones(8, "float32"))
    strategy.experimental_distribute_dataset(data.batch(4))
    say("agreed")
    jax.block_until_ready(result)


def main(told):
    case, process = told["case"], told["process"]
    if told.get("place"):
        count, index, address = told["place"]
        jax.distributed.initialize(
            address,
            count,
            index,
            coordinator_bind_address=address,
            **watchdog.INITIALIZE_ARGUMENTS,
        )
        if case == "device" and index == process:
            break_devices()
    kind, _, place = told["kind"].partition(" in a ")
    train = {"fit": fit, "loop": loop, "compiler": compile_slowly}[kind]
    if place == "thread":
        thread = threading.Thread(target=train, args=(case, process))
        thread.start()
        time.sleep(20)  # It has other things to do.
    else:
        train(case, process)
    say("end")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
