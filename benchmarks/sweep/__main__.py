"""Times a step everywhere: 190 models, batches and loops against their peers.

The points (sweep_points.json) vary one factor at a time around three base
models, and combine them at random. A worker process for each peer is kept
alive; the peers take turns on a point, and neighboring turns are compared.

    ./run bench sweep                     # at most 3 hours
    ./run bench sweep --quick             # 30 fixed points, 8 minutes
    ./run bench sweep --resume            # what the last call left
    ./run bench sweep --misses            # those again, in fresh processes
    ./run bench sweep --points mlp cnn-extra-1    # anew, into the same file
    ./run bench sweep --only factor=layer --only base=mlp
    ./run bench sweep --report --markdown table.md --svg sweep.svg
    ./run bench sweep --tails             # short epochs with a tail
    ./run bench sweep --first-step        # fresh processes, without a cache

Peers: `ours`, `dataparallel` (keras.distribution.DataParallel), `raw` (a loop
in JAX, the best of several forms of its all-reduce), `one` (Keras on one
device), `tf` (tf.distribute, on a tenth of the points), `nightly` (Keras's
next DataParallel, with --nightly-python), and `ours_even` (an indivisible
batch's even one).
"""

import argparse
import json
import pathlib
import sys
import time

# turns.py and multi_process.py lie beside this directory.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

import sweep_crew
import sweep_extras
import sweep_points
import sweep_report

RESULTS = pathlib.Path(__file__).parents[1] / "results"
POINT_SECONDS = 180
QUICK_TURNS, QUICK_SECONDS = 7, 450
SESSIONS = 2
JUDGES = ("ours", "ours_even", "dataparallel", "raw")
PEERS = ("ours", "dataparallel", "raw", "one", "tf", "nightly")


def main():
    options = parsed()
    if options.tails or options.first_step:
        mode = sweep_extras.tails if options.tails else sweep_extras.first_steps
        mode(options)
        return
    file = pathlib.Path(options.results)
    if options.misses:
        add_to_misses(file, options)
    elif not options.report:
        measure_all(chosen(options), file, options)
    sweep_report.report(file, options)


def parsed():
    parser = argparse.ArgumentParser(
        "./run bench sweep", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="30 fixed points")
    parser.add_argument("--points", nargs="+", metavar="ID")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FACTOR=VALUE"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--turns", type=int, help="of each peer: 15")
    parser.add_argument("--hours", type=float, help="at most: 3")
    parser.add_argument("--results", help="JSON lines, one a point")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what is measured"
    )
    parser.add_argument(
        "--misses",
        action="store_true",
        help="two more sessions of each point that misses; turns are added",
    )
    parser.add_argument("--nightly-python", help="where keras-nightly is")
    parser.add_argument("--tails", action="store_true")
    parser.add_argument("--first-step", action="store_true")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    for kind in ("json", "markdown", "svg"):
        parser.add_argument(f"--{kind}", metavar="FILE")
    options = parser.parse_args()
    if options.hours is None:
        options.hours = QUICK_SECONDS / 3600 if options.quick else 3.0
    if options.results is None:
        name = "sweep_quick.jsonl" if options.quick else "sweep.jsonl"
        options.results = RESULTS / name
    return options


def chosen(options):
    """The points asked for; those of equal workers are neighbors."""
    points = sweep_points.load()
    if options.quick:
        points = [p for p in points if p["quick"]]
    if options.points:
        known = {p["id"] for p in points}
        unknown = [name for name in options.points if name not in known]
        if unknown:
            raise SystemExit(f"No such points: {' '.join(unknown)}")
        points = [p for p in points if p["id"] in options.points]
    for rule in options.only:
        factor, _, value = rule.partition("=")
        points = [p for p in points if str(p[factor]) == value]
    return sorted(points, key=lambda p: (p["processes"], p["devices"] != 2))


def list_peers(point, options):
    """Who takes part; the report says who judges."""
    peers = ["ours"]
    if point["extra"]:
        # Keras takes no such batch.
        peers.append("ours_even")
    else:
        is_alone = point["processes"] == 1 and point["loop"] != "run"
        peers += ["dataparallel", "nightly"] * is_alone + ["raw"]
    if point["processes"] == 1 and point["loop"] != "run":
        peers += [] if options.quick else ["one"]
        peers += ["tf"] * (point["tf"] and not options.quick)
    wanted = {*options.peers, "ours_even"}
    if not options.nightly_python:
        wanted.discard("nightly")
    return [peer for peer in peers if peer in wanted]


def measure_all(points, file, options):
    """Measures the points, and adds each to the file when it is done."""
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    file.parent.mkdir(parents=True, exist_ok=True)
    is_part = bool(options.points or options.only)
    if not options.resume and not is_part:
        file.unlink(missing_ok=True)
    # Parts are added: of a point's records the last one counts.
    known = sweep_report.records(file) if options.resume else []
    done = {record["id"] for record in known}
    left = [point for point in points if point["id"] not in done]
    turns = options.turns or (QUICK_TURNS if options.quick else 15)
    end = time.monotonic() + options.hours * 3600
    crew = sweep_crew.Crew(options.nightly_python)
    console = Console(stderr=True)
    columns = [*Progress.get_default_columns()[:-1], TimeRemainingColumn()]
    try:
        with (
            Progress(*columns, console=console) as progress,
            file.open("a") as out,
        ):
            task = progress.add_task("", total=len(left))
            for index, point in enumerate(left):
                rest = end - time.monotonic()
                if rest < 0:
                    console.print("Out of time: the rest is for --resume.")
                    break
                progress.update(task, description=point["id"])
                record = sweep_crew.measured(
                    crew,
                    point | {"is_brief": True} if options.quick else point,
                    list_peers(point, options),
                    turns,
                    POINT_SECONDS,
                    # Fewer turns rather than a late end.
                    rest / (len(left) - index),
                )
                out.write(json.dumps(record) + "\n")
                out.flush()
                tell(record, console)
                progress.advance(task)
    finally:
        crew.dismiss()


def add_to_misses(file, options):
    """Measures what misses again, each time in processes of its own.

    Two processes of one program differ by up to a fifth on one machine, more
    than turns of one process. All turns count.
    """
    missed = sweep_report.misses(file)
    points = [p for p in sweep_points.load() if p["id"] in missed]
    with file.open("a") as out:
        for point in points * SESSIONS:
            crew = sweep_crew.Crew(options.nightly_python)
            try:
                record = sweep_crew.measured(
                    crew,
                    point,
                    [p for p in list_peers(point, options) if p in JUDGES],
                    options.turns or 15,
                    POINT_SECONDS,
                )
            finally:
                crew.dismiss()
            out.write(json.dumps(record | {"is_added": True}) + "\n")
            out.flush()
            print(point["id"], file=sys.stderr)


def tell(record, console):
    """Says loudly what failed."""
    for peer, why in record["left_out"].items():
        what = "OURS FAILED" if peer.startswith("ours") else f"without {peer}"
        console.print(f"{record['id']}: {what}: {why}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
