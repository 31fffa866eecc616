"""Planned against measured: memory of train steps on virtual CPU devices.

    ./run bench planned
    ./run bench planned --models cnn_sgd decoder --json found.json
    ./run bench planned --docs found.json         # the table of the docs
    ./run bench planned --models deep_mlp --glibc # with its own thresholds

Planned is `PlannedStep.bytes_in_all` of all devices, which are one process
here. Measured is the growth of a fresh process, from before its model is made
to the peak of its resident memory (VmHWM) in three steps of `fit`, less that
of a process with the model's tiny twin (planned_models.py).

Not counted is the peak in which values are initialized: the process waits for
them, and sets its peak anew, before the steps. What is freed goes back to the
system at once (MALLOC_MMAP_THRESHOLD_): glibc otherwise keeps blocks of up to
32 MB for later, as much as it happens to. Rows lie in the process beforehand,
as a data set would, and CPU devices use them in place.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

STEPS = 3
WITHIN = 0.15
TIME_LIMIT_SECONDS = 300
AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
# Rounds in which what initializers leave behind is freed: JAX runs ahead.
ROUNDS, PAUSE_SECONDS = 4, 0.25


def bytes_of(name):
    """VmRSS or VmHWM of this process."""
    with open("/proc/self/status") as file:
        (line,) = [x for x in file if x.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def forget_peak():
    """Sets VmHWM to what is resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def plan(case, strategy):
    """What `strategy.plan` says of a case, as JSON."""
    planned = strategy.plan(case.build, case.batch(), strategies=case.layout)
    return planned.to_json()["steps"][0]


def measure(case, strategy, is_tiny):
    """What this process grows by, in bytes, building and training."""
    import jax
    import numpy as np

    random = np.random.default_rng(0)

    def rows_of(shape):
        size = (STEPS * shape.shape[0], *shape.shape[1:])
        if shape.dtype == "int32":
            return random.integers(0, 16, size, "int32")
        return random.normal(size=size).astype(shape.dtype)

    shapes = case.batch(is_tiny=is_tiny)
    x, y = map(rows_of, shapes)
    jax.block_until_ready(jax.jit(lambda a: a + 1)(np.zeros(3)))
    before = bytes_of("VmRSS")
    forget_peak()
    with strategy.scope():
        model = case.build(is_tiny=is_tiny)
        model.optimizer.build(model.trainable_variables)
    for _ in range(ROUNDS):
        jax.block_until_ready(jax.live_arrays())
        gc.collect()
        time.sleep(PAUSE_SECONDS)
    found = {
        "building": bytes_of("VmHWM") - before,
        "built": bytes_of("VmRSS") - before,
    }
    forget_peak()
    start = time.perf_counter()
    model.fit(x, y, batch_size=shapes[0].shape[0], shuffle=False, verbose=0)
    return found | {
        "peak": bytes_of("VmHWM") - before,
        "seconds": time.perf_counter() - start,
    }


def work(name, what):
    """One process: "plan", "real" or "tiny"."""
    from planned_models import CASES

    import keras_strategies as ks

    case = CASES[name]
    partitioner = ks.experimental.FullySharded() if case.is_sharded else None
    strategy = ks.MirroredStrategy(variable_partitioner=partitioner)
    found = (
        plan(case, strategy)
        if what == "plan"
        else measure(case, strategy, what == "tiny")
    )
    print(json.dumps(found))


def run(name, what, devices, is_glibc=False):
    """What a process of its own found."""
    env = os.environ | ({} if is_glibc else AT_ONCE)
    env |= {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    # A program that is read from a cache takes other memory than a compiler.
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, __file__, "--work", what, "--models", name],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ({what}) failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name, devices, is_glibc=False):
    """A case planned and measured: a row, as JSON."""
    planned = run(name, "plan", devices)
    if planned["error"]:
        raise RuntimeError(f"{name} is not planned: {planned['error']}")
    real = run(name, "real", devices, is_glibc)
    tiny = run(name, "tiny", devices, is_glibc)
    in_all = planned["bytes_in_all"] * devices
    measured = real["peak"] - tiny["peak"]
    return {
        "planned": in_all,
        "measured": measured,
        "ratio": in_all / measured,
        "memory": planned["memory"],
        "blocks": planned["blocks"],
        "real": real,
        "tiny": tiny,
    }


def format_cells(name, row, case):
    """A row's cells, as text."""
    return (
        *(name, case.optimizer, case.policy, str(case.devices), case.layout),
        f"{row['planned'] / 1e6:,.0f}",
        f"{row['measured'] / 1e6:,.0f}",
        f"{row['ratio']:.2f}",
    )


HEADERS = (
    *("model", "optimizer", "policy", "devices", "layout"),
    *("planned, MB", "measured, MB", "ratio"),
)


def show(found, cases):
    """Prints the table."""
    import rich.box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, header in enumerate(HEADERS):
        number = position > 4 or header == "devices"
        table.add_column(header, justify="right" if number else "left")
    for name, row in found.items():
        is_off = abs(row["ratio"] - 1) > WITHIN
        style = "yellow" if is_off else None
        table.add_row(*format_cells(name, row, cases[name]), style=style)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def show_docs(found, cases):
    """Prints the table as Markdown."""
    print(f"| {' | '.join(HEADERS)} |")
    print(f"|{'---|' * 5}{'---:|' * 3}")
    for name, row in found.items():
        print(f"| {' | '.join(format_cells(name, row, cases[name]))} |")


def main():
    """Plans and measures, in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--json", help="a file; other models' rows stay in it")
    parser.add_argument("--docs", help="print the table of such a file")
    parser.add_argument("--glibc", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.models[0], options.work)
        return
    from planned_models import CASES

    if options.docs:
        with open(options.docs) as file:
            show_docs(json.load(file), CASES)
        return
    found = {}
    if options.json:
        with contextlib.suppress(FileNotFoundError), open(options.json) as file:
            found = json.load(file)
    for name in options.models or CASES:
        found[name] = compare(name, CASES[name].devices, options.glibc)
        ratio = found[name]["ratio"]
        print(f"{name}: {ratio:.3f}", file=sys.stderr, flush=True)
        if options.json:
            found = {n: found[n] for n in CASES if n in found}
            with open(options.json, "w") as file:
                json.dump(found, file, indent=1)
    show(found, CASES)


if __name__ == "__main__":
    main()
