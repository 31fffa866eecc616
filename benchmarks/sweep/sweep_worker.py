"""One peer of the sweep: a process that makes and times points when told so.

It reads commands, one JSON object a line, and answers each with one:
`prepare` makes a point's model, takes its first step and says how long that
took, `size` makes the arrays of a turn, `turn` takes one, `epochs` fits a
number of rows for some epochs, and `free` forgets the point. Process 0 of
several hands every command to the others.
"""

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback

BORN = time.perf_counter()
# JAX's names of what a first step waits for.
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
WARM_STEPS = 8
# Points after which compiled programs are forgotten.
CLEARED = 5


class Worker:
    """What the commands do; at most one point is there at a time."""

    def __init__(self, place):
        self.place = place
        self.forget()
        self.freed = 0
        self.stages = collections.Counter()
        if place.role != "tf":
            import jax

            jax.monitoring.register_event_duration_secs_listener(self.note)

    def note(self, event, seconds, **_):
        if event in STAGES:
            self.stages[STAGES[event]] += seconds

    def forget(self):
        self.point = self.bind = self.work = None
        self.steps = 0

    def prepare(self, point):
        import sweep_loops
        import sweep_models

        self.stages.clear()
        start = time.perf_counter()
        bind, facts = sweep_loops.bound(self.place.role, point, self.place)
        made = time.perf_counter()
        spe = point["spe"]
        bind(*sweep_models.data(point, spe))()
        first = time.perf_counter()
        told = {k: round(s, 3) for k, s in self.stages.items()}
        self.point, self.bind = point, bind
        self.size(max(WARM_STEPS // spe, 1) * spe)
        return facts | {
            "make_s": round(made - start, 3),
            "first_s": round(first - start, 3),
            "stages": told,
            "ms": min(self.turn()["ms"] for _ in range(2)),
        }

    def size(self, steps):
        import sweep_models

        self.steps = steps
        self.work = self.bind(*sweep_models.data(self.point, steps))
        self.work()
        return {}

    def turn(self):
        start = time.perf_counter()
        self.work()
        seconds = time.perf_counter() - start
        return {"ms": seconds / self.steps * 1e3}

    def epochs(self, rows, epochs):
        """Milliseconds of each epoch after the first, of one fit."""
        import keras
        import sweep_models
        import sweep_points

        ends = []
        told = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
        )
        x, y = sweep_models.rows_of(self.point, rows)
        model = self.bind.args[0]
        model.fit(
            x,
            y,
            batch_size=sweep_points.batch_rows(self.point),
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[told],
        )
        pairs = zip(ends, ends[1:], strict=False)
        return {"ms": [(b - a) * 1e3 for a, b in pairs]}

    def free(self):
        import gc

        import keras

        self.forget()
        keras.utils.clear_session()
        gc.collect()
        self.freed += 1
        if self.place.role != "tf" and self.freed % CLEARED == 0:
            import jax

            # Not each time: they hold the small programs that make weights.
            jax.clear_caches()
        return {}

    def first(self, point):
        """Everything up to the end of a first step, in a fresh process."""
        import keras  # noqa: F401

        imported = time.perf_counter()
        told = self.prepare(point)
        return told | {"import_s": round(imported - BORN, 3)}


def versions():
    import importlib.metadata as metadata

    names = "keras", "keras-nightly", "jax", "tensorflow-cpu"
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def serve(place, answers):
    """Answers each command read, until there are no more."""
    count = 1 if place.process else place.processes
    others = [follower(index) for index in range(1, count)]
    if place.role == "ours":
        # Before keras, whose backend it chooses.
        import keras_strategies  # noqa: F401
    worker = Worker(place)
    for line in sys.stdin:
        for other in others:
            other.stdin.write(line)
            other.stdin.flush()
        command, *arguments = json.loads(line)
        try:
            told = getattr(worker, command)(*arguments)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
            worker.forget()
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    for other in others:
        other.kill()
    # Past JAX's end, which waits for other processes.
    os._exit(0)


def follower(index):
    """Another process of this worker."""
    return subprocess.Popen(
        [sys.executable, *sys.argv, "--process", str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--role", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--address", default="")
    place = parser.parse_args()
    # What libraries print must not meet the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps({"versions": versions()}) + "\n")
    answers.flush()
    serve(place, answers)


if __name__ == "__main__":
    main()
