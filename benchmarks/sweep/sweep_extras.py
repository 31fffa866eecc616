"""Two smaller measurements of the sweep: epochs with a tail, first steps."""

import json
import pathlib
import statistics

import sweep_crew
import sweep_points

EPOCHS, UNCOUNTED = 22, 2
# Devices: rows of an epoch of batches of 64. The first has no tail.
TAILS = {2: (256, 250, 251), 4: (256, 250)}
BATCH = 64
TAIL_LIMIT, FIRST_LIMIT = 1.2, 1.3
SECONDS = 180


def tails(options):
    """Epochs of 4 steps, whose last batch is short, per row of whole ones."""
    crew, found = sweep_crew.Crew(), []
    try:
        for devices in TAILS:
            for base in sweep_points.BASES:
                found += measure_tails(crew, base, devices, options.turns or 3)
    finally:
        crew.dismiss()
    show(
        f"Epochs of {BATCH} rows a batch (medians of {EPOCHS - UNCOUNTED}), "
        f"per row of one without a tail: at most {TAIL_LIMIT}x",
        found,
        options,
    )


def measure_tails(crew, base, devices, count):
    """A record for each number of rows; they take turns."""
    point = sweep_points.point(
        f"{base}-tail", base, "tail", devices=devices, rows=BATCH // devices
    )
    worker = crew.worker("ours", point)
    worker.ask("prepare", point, seconds=SECONDS)
    ms = {rows: [] for rows in TAILS[devices]}
    for _ in range(count):
        for rows, turns in ms.items():
            told = worker.ask("epochs", rows, EPOCHS, seconds=SECONDS)
            turns.append(statistics.median(told["ms"][UNCOUNTED - 1 :]))
    worker.ask("free", seconds=SECONDS)
    whole, *others = TAILS[devices]
    return [
        {
            "model": base,
            "devices": devices,
            "rows": rows,
            "epoch, ms": statistics.median(ms[rows]),
            f"{whole} rows, ms": statistics.median(ms[whole]),
            "per row": statistics.median(
                one / rows * whole / other
                for one, other in zip(ms[rows], ms[whole], strict=True)
            ),
        }
        for rows in others
    ]


def first_steps(options):
    """Time to the end of a first step, in fresh processes, in turns."""
    found = []
    peers = [p for p in ("ours", "dataparallel") if p in options.peers]
    for base in sweep_points.BASES:
        point = sweep_points.point(base, base, "base")
        told = {peer: [] for peer in peers}
        for _ in range(options.turns or 5):
            for peer in peers:
                told[peer].append(first_step(peer, point))
        totals = {}
        for peer, each in told.items():
            middle = {
                name: statistics.median(one[name] for one in each)
                for name in each[0]
            }
            totals[peer] = middle["total"]
            against = totals["ours"] / middle["total"] if "ours" in told else 0
            found.append(
                {"model": base, "peer": peer, **middle, "ours /": against}
            )
    show(
        "Seconds to the end of the first step in a fresh process, without a "
        f"compilation cache: at most {FIRST_LIMIT}x",
        found,
        options,
    )


def first_step(peer, point):
    """Seconds of each part of a fresh process's first step."""
    crew = sweep_crew.Crew()
    try:
        worker = crew.worker(peer, point)
        told = worker.ask("first", point, seconds=SECONDS)
    finally:
        crew.dismiss()
    return {
        "total": told["import_s"] + told["first_s"],
        "imports": told["import_s"],
        "make": told["make_s"],
        "first step": told["first_s"] - told["make_s"],
        **told["stages"],
    }


def show(title, found, options):
    """Prints records as a table, and writes them where asked to."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in found[0]:
        table.add_column(column)
    for record in found:
        table.add_row(
            *(
                f"{value:.3f}" if isinstance(value, float) else str(value)
                for value in record.values()
            )
        )
    Console(width=120).print(table)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
