"""Time of a step of `fit` with `ks.callbacks.RunReport`, and without it.

    ./run bench report
    ./run bench report --widths 128 512 --devices 2

For each width, a model trains for epochs that take turns: one with the report,
one without. Medians of the differences of neighboring turns are compared with
the time of a step: of the time that passed ("report_ms"), and of the CPU time
of the loop's thread ("cpu_ms"), which other programs disturb less. "hooks" is
the time of the report's own code in a step, in a loop that does nothing else.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np

ROWS = 64


def epochs(model, x, y, steps, turns):
    """Milliseconds of a step, as (time, CPU time), by whether it reports."""
    import keras

    import keras_strategies as ks

    class Timer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter(), time.thread_time()

        def on_epoch_end(self, epoch, logs=None):
            now = time.perf_counter(), time.thread_time()
            pairs = zip(now, self.start, strict=True)
            self.ms = [(a - b) / steps * 1e3 for a, b in pairs]

    times = {True: [], False: []}
    for turn in range(turns + 1):
        # Each kind comes first in half of the turns.
        for has_report in (turn % 2 == 0, turn % 2 == 1):
            timer = Timer()
            report = [ks.callbacks.RunReport(verbose=False)] * has_report
            model.fit(
                x,
                y,
                batch_size=ROWS,
                shuffle=False,
                verbose=0,
                callbacks=[timer, *report],
            )
            # The first turn compiles.
            if turn:
                times[has_report].append(timer.ms)
    return times


def hooks(steps):
    """Microseconds of the report's code in a step."""
    import jax

    from keras_strategies.names import phases
    from keras_strategies.reporting.recorder import StepRecorder
    from keras_strategies.spmd.batches import Execution, Segment

    data = (np.zeros((ROWS, 8), "float32"), np.zeros((ROWS, 1), "float32"))
    segment = Segment(data=jax.device_put(data), rows=ROWS, steps=1)
    execution = Execution(segments=(segment,))
    logs = ({"loss": jax.device_put(np.float32(0))},)

    def run():
        start = time.perf_counter()
        for _ in range(steps):
            with phases.Phase(phases.INPUT) as phase:
                phase.result = execution
            with phases.Phase(phases.PROGRAM) as phase:
                phase.result = logs
        return (time.perf_counter() - start) / steps * 1e6

    without = min(run() for _ in range(5))
    with phases.recording(StepRecorder()):
        return min(run() for _ in range(5)) - without


def build(width, layers):
    import keras

    import keras_strategies as ks

    with ks.MirroredStrategy().scope():
        hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
        model = keras.Sequential(
            [keras.Input((width,)), *hidden, keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[128, 256, 512]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=21)
    given = parser.parse_args()
    count = f"--xla_force_host_platform_device_count={given.devices}"
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
    print(json.dumps({"hooks_us": round(hooks(20_000), 2)}))
    random = np.random.default_rng(0)
    for width in given.widths:
        rows = ROWS * given.steps
        x = random.normal(size=(rows, width)).astype("float32")
        y = random.normal(size=(rows, 1)).astype("float32")
        times = epochs(
            build(width, given.layers),
            *(x, y, given.steps, given.turns),
        )
        plain = statistics.median(wall for wall, _ in times[False])
        pairs = list(zip(times[True], times[False], strict=True))
        wall, own = (
            statistics.median(one[k] - other[k] for one, other in pairs)
            for k in range(2)
        )
        found = {"width": width, "step_ms": plain, "report_ms": wall}
        found |= {"percent": 100 * wall / plain}
        found |= {"cpu_ms": own, "cpu_percent": 100 * own / plain}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
