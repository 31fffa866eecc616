"""What checkpoints cost: one save, one restore, and a fit that is kept.

`save`: the time for which a save keeps the loop waiting, the time until it is
on the disk, and a restore, of random weights on virtual CPU devices; in one
process, where the peers take turns. `fit`: whole fits of the models of `bench
fit` with `ks.callbacks.Checkpoint` against fits without, each in a process of
its own; they take turns as well (turns.py). Medians are compared.

    ./run bench checkpoint
    ./run bench checkpoint --parts save --megabytes 100
    ./run bench checkpoint --parts fit --workloads small_mlp --every 500

Peers of a save: `ours` (ks.checkpoint.CheckpointManager: with checksums, which
a restore verifies), `orbax` (AsyncCheckpointer with StandardSave), `orbax
manager` (its CheckpointManager), `h5` (Keras's save_weights, which is done
when it returns).
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time

import turns

PEERS = ("ours", "orbax", "orbax manager", "h5")
TIMES = ("blocking", "until on disk", "CPU of a save", "restore")
# Workload: the model of `bench fit`, rows of a batch, steps of a fit.
WORKLOADS = {
    "resnet20": ("resnet20", 128, 100),
    "wide_mlp_1024": ("wide_mlp", 1024, 600),
    "wide_mlp": ("wide_mlp", 256, 1000),
    "small_mlp": ("small_mlp", 64, 2000),
}


def build_weights(megabytes, count):
    """A model of random weights, without an optimizer."""
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    columns = 512
    rows = max(megabytes * 10**6 // 4 // count // columns, 1)

    class Weights(keras.Layer):
        def build(self, shape):
            del shape
            for index in range(count):
                variable = self.add_weight(
                    shape=(rows, columns), name=f"weight_{index}"
                )
                variable.assign(random.normal(size=(rows, columns)))

        def call(self, inputs):
            return inputs

    model = keras.Sequential([keras.Input((1,)), Weights()])
    assert len(model.variables) == count
    return model


class Ours:
    def __init__(self, model, directory):
        import keras_strategies as ks

        self._manager = ks.checkpoint.CheckpointManager(
            ks.checkpoint.Checkpoint(model=model), directory, keep=1
        )

    def save(self, step):
        self._manager.save(step)

    def wait(self):
        self._manager.wait()

    def restore(self, step):
        self._manager.restore(step)


class Orbax:
    """Orbax as its documentation has it, with the arrays of a model."""

    def __init__(self, model, directory):
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._model = model
        self._directory = directory
        self._checkpointer = self._make(ocp)

    def _make(self, ocp):
        return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def _path(self, step):
        return f"{self._directory}/{step}"

    def arrays(self):
        return {v.path.replace("/", "."): v.value for v in self._model.weights}

    def save(self, step):
        self._checkpointer.save(
            self._path(step), args=self._args.StandardSave(self.arrays())
        )

    def wait(self):
        self._checkpointer.wait_until_finished()

    def restore(self, step):
        import jax

        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=a.sharding
            ),
            self.arrays(),
        )
        restored = self._checkpointer.restore(
            self._path(step), args=self._args.StandardRestore(like)
        )
        for variable, value in zip(
            self._model.weights, restored.values(), strict=True
        ):
            variable.assign(value)


class OrbaxManager(Orbax):
    def _make(self, ocp):
        return ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )

    def _path(self, step):
        return step


class H5:
    def __init__(self, model, directory):
        os.mkdir(directory)
        self._model = model
        self._file = f"{directory}/model.weights.h5"

    def save(self, step):
        del step
        self._model.save_weights(self._file)

    def wait(self):
        pass

    def restore(self, step):
        del step
        self._model.load_weights(self._file)


def saved(options):
    """A function that saves and restores with each peer, and its times."""
    import jax

    import keras_strategies as ks

    with ks.MirroredStrategy().scope():
        model = build_weights(options.megabytes[0], options.variables)
    kinds = dict(zip(PEERS, (Ours, Orbax, OrbaxManager, H5), strict=True))
    peers = {
        name: kind(model, f"{options.directory}/{name.replace(' ', '_')}")
        for name, kind in kinds.items()
    }
    times = {}
    step = 0

    def ready():
        jax.block_until_ready([v.value for v in model.variables])

    def turn():
        nonlocal step
        step += 1
        for name, peer in peers.items():
            for variable in model.variables:
                variable.assign(variable.value + 1)
            ready()
            # What other peers wrote is not to wait in the disk's queue.
            os.sync()
            began, worked = time.perf_counter(), time.process_time()
            peer.save(step)
            blocking = time.perf_counter() - began
            peer.wait()
            on_disk = time.perf_counter() - began
            worked = time.process_time() - worked
            began = time.perf_counter()
            peer.restore(step)
            ready()
            restore = time.perf_counter() - began
            seconds = (blocking, on_disk, worked, restore)
            times[name] = [1e3 * each for each in seconds]
            shutil.rmtree(
                f"{options.directory}/orbax/{step}", ignore_errors=True
            )

    return turn, times


def fitted(options):
    """A function that trains, kept or not; and one that clears up."""
    import fit

    import keras_strategies as ks

    workload = options.workloads[0]
    name, batch_size, steps = WORKLOADS[workload]
    x, y = fit.data(name, steps * batch_size // fit.SIZES[name][0])
    with ks.MirroredStrategy().scope():
        model = fit.build(name, 1)
    directory = f"{options.directory}/{workload}"
    runs = itertools.count()
    worked = 0.0

    def train():
        # What is done in one directory is not done again.
        nonlocal worked
        worked = -time.process_time()
        kept = ks.callbacks.Checkpoint(
            f"{directory}/{next(runs)}", save_every_steps=options.every, keep=2
        )
        model.fit(
            x,
            y,
            batch_size=batch_size,
            shuffle=False,
            verbose=0,
            callbacks=[kept] if options.peer == "kept" else [],
        )
        worked += time.process_time()

    def clear():
        shutil.rmtree(directory, ignore_errors=True)
        return {"cpu_ms": 1e3 * worked / steps}

    return train, clear


def serve(options):
    """One peer's process."""
    if options.peer == "save":
        turn, times = saved(options)
        turns.serve(turn, 1, lambda: {"times": times})
        return
    train, clear = fitted(options)
    turns.serve(train, WORKLOADS[options.workloads[0]][2], clear)


def started(peer, options, log, **arguments):
    arguments = arguments | {
        "peer": peer,
        "directory": options.directory,
        "every": options.every,
        "variables": options.variables,
    }
    return turns.start(
        [part for k, v in arguments.items() for part in (f"--{k}", str(v))],
        on_tensorflow=False,
        devices=options.devices,
        log=log,
    )


def session_of_saves(megabytes, options):
    """Milliseconds of each peer's turns, by peer and what was timed."""
    told = turns.session(
        ["save"],
        lambda peer, log: started(peer, options, log, megabytes=megabytes),
        options.repeats,
    )["save"]
    return {
        peer: {
            name: [turn["times"][peer][index] for turn in told]
            for index, name in enumerate(TIMES)
        }
        for peer in PEERS
    }


def session_of_fits(workload, options):
    """Milliseconds a step, and of CPU, of fits without checkpoints and with."""
    told = turns.session(
        ["none", "kept"],
        lambda peer, log: started(peer, options, log, workloads=workload),
        options.repeats,
    )
    return {
        peer: {name: [turn[name] for turn in each] for name in ("ms", "cpu_ms")}
        for peer, each in told.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--parts", nargs="+", choices=("save", "fit"), default=("save", "fit")
    )
    parser.add_argument("--megabytes", nargs="+", type=int, default=[100, 1000])
    parser.add_argument(
        "--variables", type=int, default=24, help="that share the megabytes"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=tuple(WORKLOADS),
        default=list(WORKLOADS),
    )
    parser.add_argument(
        "--every", type=int, default=50, help="steps between saves of a fit"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    for hidden in ("--peer", "--directory"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        report(options, directory)


def report(options, directory):
    """Measures all, prints tables of medians and ratios."""
    from rich.console import Console

    samples = {}
    console = Console(width=100)
    options.directory = directory
    if "save" in options.parts:
        for megabytes in options.megabytes:
            with tempfile.TemporaryDirectory(
                dir=directory
            ) as options.directory:
                measured = session_of_saves(megabytes, options)
            samples[f"{megabytes} MB"] = measured
            console.print(table_of_saves(megabytes, measured, options))
    if "fit" in options.parts:
        fits = {}
        for workload in options.workloads:
            with tempfile.TemporaryDirectory(
                dir=directory
            ) as options.directory:
                fits[workload] = session_of_fits(workload, options)
        samples["fit"] = fits
        console.print(table_of_fits(fits, options))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"devices": options.devices, **samples}, file)


def table_of_saves(megabytes, samples, options):
    from rich.table import Table

    table = Table(
        title=f"{megabytes} MB in {options.variables} variables on "
        f"{options.devices} virtual CPU devices, ms (ours / peer), medians of "
        f"{options.repeats}"
    )
    table.add_column("peer", no_wrap=True)
    for name in TIMES:
        table.add_column(name, justify="right", no_wrap=True)
    ours = samples["ours"]
    for peer, times in samples.items():
        cells = []
        for name, ms in times.items():
            text = f"{statistics.median(ms):.0f}"
            if peer != "ours":
                ratio = statistics.median(ours[name]) / statistics.median(ms)
                text += f" ({ratio:.2f}x)"
            cells.append(text)
        table.add_row(peer, *cells)
    return table


def table_of_fits(samples, options):
    from rich.table import Table

    table = Table(
        title=f"fit on {options.devices} virtual CPU devices, a checkpoint "
        f"every {options.every} steps, ms a step, medians of {options.repeats}"
    )
    for name in ("workload", "", "none", "kept", "kept / none"):
        table.add_column(name, justify="right", no_wrap=True)
    for workload, measured in samples.items():
        for name, shown in (("ms", "time"), ("cpu_ms", "CPU")):
            none, kept = (
                statistics.median(measured[peer][name])
                for peer in ("none", "kept")
            )
            table.add_row(
                workload,
                shown,
                f"{none:.2f}",
                f"{kept:.2f}",
                f"{kept / none:.2f}x",
            )
    return table


if __name__ == "__main__":
    main()
