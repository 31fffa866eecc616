"""Train steps on a GPU that is there: times and memory, beside their plans.

Each model and peer is a process: `ours` (MirroredStrategy), `keras` (plain
Keras) and `raw` (a loop over Keras's stateless step in `jax.jit`). They compile
at the same time, and measure one after the other.

    ./run bench gpu_run --plan plans.json    # on any machine, with JAX's plugin
    ./run bench gpu_run --plans plans.json   # on a machine with a GPU
"""

import argparse
import fcntl
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

MODELS = ("mlp", "resnet50", "decoder", "wide")
PEERS = ("ours", "keras", "raw")
TOPOLOGY = "h100:1"
POLICY = "mixed_bfloat16"
TURNS, STEPS = 7, 20


def choose_model(name):
    """Returns a function that makes a model, and the rows of a batch."""
    import gpu_steps
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self, width, heads, hidden, **kwargs):
            super().__init__(**kwargs)
            self.norms = [layers.RMSNormalization() for _ in range(2)]
            self.attention = layers.GroupQueryAttention(
                width // heads, heads, heads, use_bias=False
            )
            self.gate = layers.Dense(hidden, "silu", use_bias=False)
            self.up = layers.Dense(hidden, use_bias=False)
            self.down = layers.Dense(width, use_bias=False)

        def build(self, shape):
            self.attention.build(shape, shape)
            for layer in (*self.norms, self.gate, self.up):
                layer.build(shape)
            self.down.build((*shape[:-1], self.up.units))

        def call(self, x):
            y = self.norms[0](x)
            x = x + self.attention(y, y, use_causal_mask=True)
            y = self.norms[1](x)
            return x + self.down(self.up(y) * self.gate(y))

    def wide(length=2048, width=2048, heads=16, hidden=5504, blocks=24):
        """Returns a decoder of 1.3 billion weights, rematerialized."""
        names = [f"block{i}" for i in range(blocks)]
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(32000, width)(tokens)
        with keras.RematScope(mode="list_of_layers", layer_names=names):
            for each in names:
                x = Block(width, heads, hidden, name=each)(x)
        x = layers.RMSNormalization()(x)
        return keras.Model(tokens, layers.Dense(32000, use_bias=False)(x))

    if name == "wide":
        return wide, 2
    make, rows = gpu_steps.MODELS[name]
    return make, 1024 if name == "mlp" else rows


def compile_model(make):
    """Returns the compiled model."""
    import gpu_steps

    model = make()
    model.compile(gpu_steps.make_optimizer(), gpu_steps.make_loss())
    return model


def plan(names, path):
    """Plans each model's step, and writes the plans to a file."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import gpu_steps
    import keras

    import keras_strategies as ks

    keras.config.set_dtype_policy(POLICY)
    found = {}
    for name in names:
        make, rows = choose_model(name)
        with ks.abstract():
            batch = gpu_steps.make_batch(make(), rows)
        planned = ks.OneDeviceStrategy("cpu:0").plan(
            lambda make=make: compile_model(make),
            batch,
            [TOPOLOGY],
            strategies="replicated",
        )
        found[name] = planned.to_json()["steps"][0]
        print(name, json.dumps(found[name]), flush=True)
        pathlib.Path(path).write_text(json.dumps(found))


def measure(run):
    """Returns the milliseconds of a step, for each turn."""
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return times


def make_data(batch):
    """Returns arrays of the rows of all steps."""
    import numpy as np

    random = np.random.default_rng(0)

    def draw(shape):
        size = (STEPS * shape.shape[0], *shape.shape[1:])
        if shape.dtype == "int32":
            return random.integers(0, 10, size, dtype="int32")
        return random.normal(size=size).astype(shape.dtype)

    return [draw(shape) for shape in batch]


def loop(model, x, y, rows):
    """Returns a function that runs a raw loop over all steps."""
    import gpu_steps
    import jax

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    state = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]

    jitted = jax.jit(
        gpu_steps.make_raw_step(model, optimizer, model.loss),
        donate_argnums=(0, 1, 2),
    )

    def run():
        nonlocal state
        for k in range(STEPS):
            part = slice(k * rows, (k + 1) * rows)
            batch = jax.device_put((x[part], y[part]))
            value, *state = jitted(*state, *batch)
        value.block_until_ready()

    return run


def work(name, peer, rows, lock):
    """Measures one model and peer, and prints what was found."""
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Until it measures, a process shares the GPU with others that compile.
    file = open(lock, "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_SH)
    import gpu_steps
    import jax
    import keras

    import keras_strategies as ks

    keras.config.set_dtype_policy(POLICY)
    make, default = choose_model(name)
    rows = rows or default
    if peer == "ours":
        strategy = ks.MirroredStrategy(jax.devices("gpu")[:1])
        with strategy.scope():
            model = compile_model(make)
    else:
        model = compile_model(make)
    batch = gpu_steps.make_batch(model, rows)
    x, y = make_data(batch)
    if peer == "raw":
        run = loop(model, x, y, rows)
    else:
        options = {"batch_size": rows, "shuffle": False, "verbose": 0}

        def run(**more):
            return model.fit(x, y, **options, **more)

    start = time.perf_counter()
    run()
    found = {"name": name, "peer": peer, "rows": rows}
    found["first_s"] = time.perf_counter() - start
    run()
    stats = jax.devices()[0].memory_stats()
    found["peak_gb"] = stats["peak_bytes_in_use"] / 1e9
    fcntl.flock(file, fcntl.LOCK_EX)
    times = measure(run)
    found["ms"], found["all_ms"] = statistics.median(times), times
    if peer == "ours":
        report = ks.callbacks.RunReport(verbose=False)
        run(callbacks=[report])
        found["report"] = report.figures
        program = strategy.compile_step(model, batch)
        memory = program.executable.memory_analysis()
        found["argument_bytes"] = memory.argument_size_in_bytes
        found["temporary_bytes"] = memory.temp_size_in_bytes
    print("found", json.dumps(found), flush=True)


def start(name, peer, rows, lock):
    """Starts a process that measures."""
    words = [sys.executable, __file__, "--work", peer, "--models", name]
    words += ["--rows", str(rows), "--lock", lock]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_all(options):
    """Measures all, and returns what was found."""
    found = []
    with tempfile.NamedTemporaryFile() as lock:
        for group in [
            [n for n in options.models if n != "wide"],
            *([["wide"]] if "wide" in options.models else []),
        ]:
            peers = options.peers
            if group == ["wide"]:
                # Two of them do not fit in the memory beside each other.
                peers = peers[:1]
            processes = {
                (name, peer): start(name, peer, options.rows, lock.name)
                for name in group
                for peer in peers
            }
            for key, process in processes.items():
                out, error = process.communicate()
                lines = [x for x in out.splitlines() if x.startswith("found ")]
                if not lines:
                    print(*key, "failed:", error[-3000:], flush=True)
                    continue
                found.append(json.loads(lines[0][6:]))
                print(json.dumps(found[-1]), flush=True)
    return found


def show(found, plans):
    """Prints a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    titles = ("model", "peer", "rows", "ms", "planned ms", "first fit, s")
    for title in (*titles, "peak GB", "planned GB", "temporary, planned MB"):
        table.add_column(title)
    for row in found:
        planned = plans.get(row["name"], {}) if row["peer"] == "ours" else {}
        size = planned.get("bytes_in_all")
        seconds = planned.get("estimate", {}).get("seconds")
        temporary = row.get("temporary_bytes")
        table.add_row(
            *(row["name"], row["peer"], str(row["rows"])),
            f"{row['ms']:.2f}",
            f"{seconds * 1e3:.2f}" if seconds else "",
            f"{row['first_s']:.1f}",
            f"{row['peak_gb']:.2f}",
            f"{size / 1e9:.2f}" if size else "",
            f"{temporary / 1e6:.0f}" if temporary else "",
        )
    Console(width=120).print(table)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--plan", help="only plan, and write to this file")
    parser.add_argument("--plans", help="a file that `--plan` has written")
    parser.add_argument("--json", help="a file for what was measured")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.models[0], options.work, options.rows, options.lock)
    elif options.plan:
        plan(options.models, options.plan)
    else:
        found = run_all(options)
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(found))
        plans = {}
        if options.plans:
            plans = json.loads(pathlib.Path(options.plans).read_text())
        show(found, plans)


if __name__ == "__main__":
    main()
