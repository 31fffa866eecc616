"""Time of a step on several processes, beside one process of as many devices.

Every peer has two virtual CPU devices in all: in two processes of one, or in
one process of two. All peers take turns, one whole fit each (turns.py), and
medians of the turns are compared.

    ./run bench multi_process
    ./run bench multi_process --quick
    ./run bench multi_process --workloads small_mlp --repeats 9

Peers: `ours` (MultiWorkerMirroredStrategy, 2 processes, arrays), `ours,
tf.data` (the same, fed by tf.data), `ours, 1 process` (MirroredStrategy,
arrays), `keras` (keras.distribution.initialize and DataParallel, 2 processes;
it takes tf.data alone) and `keras, 1 process` (DataParallel, arrays).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys

import fit
import turns

PEERS = {
    "ours": 2,
    "ours, tf.data": 2,
    "ours, 1 process": 1,
    "keras": 2,
    "keras, 1 process": 1,
}
"""The peers, and the processes of each."""

# Workload: steps of a fit.
WORKLOADS = {"small_mlp": 100, "wide_mlp": 30}
DEVICES = 2


def prepare(peer, options):
    """A function that trains for an epoch, in each process of the peer.

    Also starts the job: all processes call this together.
    """
    rows = fit.SIZES[options.workload][0]
    x, y = fit.data(options.workload, options.steps)
    arguments = {"verbose": 0, "shuffle": False}
    arrays = {"x": x, "y": y, "batch_size": rows}
    if peer.startswith("ours"):
        model = ours(peer, options)
    else:
        model = keras_own(peer, options)
    if peer in ("keras", "ours, tf.data"):
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)
        return lambda: model.fit(data, **arguments)
    return lambda: model.fit(**arrays, **arguments)


def ours(peer, options):
    import keras_strategies as ks

    if PEERS[peer] == 1:
        strategy = ks.MirroredStrategy()
    else:
        strategy = ks.MultiWorkerMirroredStrategy(
            coordinator_address=options.address,
            num_processes=PEERS[peer],
            process_id=options.process,
        )
    with strategy.scope():
        return fit.build(options.workload, 1)


def keras_own(peer, options):
    import keras

    if PEERS[peer] > 1:
        keras.distribution.initialize(
            options.address, PEERS[peer], options.process
        )
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    return fit.build(options.workload, 1)


def serve(options):
    """Process 0 of a peer: it starts the others, and tells them each turn."""
    others = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--process", str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for index in range(1, PEERS[options.peer])
    ]
    try:
        train = prepare(options.peer, options)

        def work():
            for other in others:
                other.stdin.write("\n")
                other.stdin.flush()
            train()

        turns.serve(work, options.steps)
    finally:
        for other in others:
            other.kill()
            other.wait()
    # Past JAX's end, which waits for the others.
    os._exit(0)


def follow(options):
    """Another process of a peer: fits whenever process 0 does."""
    train = prepare(options.peer, options)
    for _ in sys.stdin:
        train()
    os._exit(0)


def start(peer, workload, options, log):
    """Starts one peer's process 0, which warms up."""
    words = {
        "--peer": peer,
        "--workload": workload,
        "--steps": WORKLOADS[workload],
        "--address": f"127.0.0.1:{free_port()}",
    }
    return turns.start(
        [str(part) for item in words.items() for part in item],
        on_tensorflow=False,
        devices=DEVICES // PEERS[peer],
        log=log,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS)
    )
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS)
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="the small MLP alone, 3 turns"
    )
    for hidden in ("--peer", "--workload", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--steps", "--process"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        (follow if options.process else serve)(options)
        return
    if options.quick:
        options.workloads, options.repeats = ["small_mlp"], 3
    report(options)


def report(options):
    """Measures all, prints a table of medians and ratios."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    samples = {}
    for workload in track(
        options.workloads, "measuring", console=Console(stderr=True)
    ):
        told = turns.session(
            options.peers,
            lambda peer, log, w=workload: start(peer, w, options, log),
            options.repeats,
        )
        samples[workload] = {
            peer: [turn["ms"] for turn in each] for peer, each in told.items()
        }
    table = Table(
        title=f"fit on {DEVICES} virtual CPU devices ({os.cpu_count()} "
        "cores), ms a step (ours / peer), "
        f"medians of {options.repeats}"
    )
    table.add_column("workload")
    for peer in options.peers:
        table.add_column(peer, justify="right")
    for workload, told in samples.items():
        medians = {peer: statistics.median(ms) for peer, ms in told.items()}
        table.add_row(
            workload, *(shown(peer, medians) for peer in options.peers)
        )
    Console(width=110).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(samples, file)


def shown(peer, medians):
    """A cell: the peer's median, and ours divided by it."""
    if peer not in medians:
        return "aborted"
    text = f"{medians[peer]:.2f}"
    if peer != "ours" and "ours" in medians:
        text += f" ({medians['ours'] / medians[peer]:.2f}x)"
    return text


if __name__ == "__main__":
    main()
