"""Time of a step that accumulates gradients, summed once per update or always.

    ./run bench accumulation
    ./run bench accumulation --devices 4 --width 64
    ./run bench accumulation --processes 2

Peers: `once` (gradients are summed over the replicas once per update) and
`each` (in each step, as with an optimizer that a user defines). Both are
models in one job, which take turns of one `fit` each; medians of the turns are
compared.
"""

import argparse
import json
import statistics
import time

import numpy as np

from keras_strategies.testing import run_processes

PEERS = ("once", "each")
OUTPUTS = 4


def build(strategy, peer, width, layers, k):
    import keras

    class Each(keras.optimizers.Adam):
        """An optimizer that is not Keras's, which gets sums in each step."""

    kind = keras.optimizers.Adam if peer == "once" else Each
    hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((width,)), *hidden, keras.layers.Dense(OUTPUTS)]
        )
        model.compile(kind(1e-3, gradient_accumulation_steps=k), "mse")
    return model


def measure(processes, width, layers, rows, steps, k, turns):
    """Milliseconds of a step in each turn, by peer."""
    import keras_strategies as ks

    if processes > 1:
        strategy = ks.MultiWorkerMirroredStrategy()
    else:
        strategy = ks.MirroredStrategy()
    random = np.random.default_rng(0)
    x = random.normal(size=(rows * steps, width)).astype("float32")
    y = random.normal(size=(rows * steps, OUTPUTS)).astype("float32")
    models = {peer: build(strategy, peer, width, layers, k) for peer in PEERS}
    times = {peer: [] for peer in PEERS}
    for turn in range(turns + 1):
        for peer, model in models.items():
            start = time.perf_counter()
            model.fit(x, y, batch_size=rows, verbose=0, shuffle=False)
            spent = (time.perf_counter() - start) / steps * 1e3
            # The first turn compiles.
            if turn:
                times[peer].append(spent)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2, help="in all")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--turns", type=int, default=7)
    given = vars(parser.parse_args())
    devices = given.pop("devices")
    times = run_processes(
        "benchmarks.accumulation:measure",
        given["processes"],
        args=list(given.values()),
        devices_per_process=devices // given["processes"],
    )[0].value
    medians = {peer: statistics.median(times[peer]) for peer in PEERS}
    ratio = medians["once"] / medians["each"]
    print(json.dumps(given | {"devices": devices} | medians))
    print(f"once per update: {ratio:.2f} of the time with a sum in each step")


if __name__ == "__main__":
    main()
