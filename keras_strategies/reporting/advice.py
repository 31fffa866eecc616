"""The sentence that names the main cause of lost time in a run, and a fix."""

from collections.abc import Mapping
from typing import Any

# The share of the time from which a cause is named.
_MIN_SHARE = 0.1
# The share of programs before whose start the devices must have been idle.
_MIN_IDLE = 0.5
# The time of a batch's input that faster data cannot shorten much.
_SHORT_MS = 1.0
_MAX_SHAPES = 3
_NEEDED = {"step_ms", "input_ms", "idle"}
_NO_PROCESS = {"extra_share": 0.0, "input_share": 0.0, "input_ms": 0.0}

FIRST = "the first step"
SHAPE = "a new shape: "
EXECUTION = "a last execution of "
AGAIN = "a step, for the same shapes"

_SENTENCES = {
    "input": (
        "waits for input{where}: make the data faster to read (more `workers`, "
        "files that are read in parallel, less work for each row), or read it "
        "once into memory"
    ),
    "process": (
        "waits for process {processes[slowest]}, which spends "
        "{processes[extra_ms]:.3g} ms a step more in Python than the others: "
        "look at its callbacks, and at other programs on its host"
    ),
    "callbacks": (
        "runs callbacks: call the slow ones less often, for example at the end "
        "of an epoch"
    ),
    "save": (
        "waits for checkpoints ({saves} saves): save less often (a larger "
        "`save_every_steps`, or `save_every_seconds`)"
    ),
    "compile": (
        "compiles the step again for the same shapes: do not change the model "
        "between steps, and pass Python values that change as arrays"
    ),
    "shapes": (
        "compiles the step for new shapes ({shapes}): pad the batches to a few "
        "shapes"
    ),
    "executions": (
        "compiles the step for {executions}: choose a number of steps in an "
        "epoch that is a multiple of `steps_per_execution`"
    ),
    "evaluate": (
        "evaluates the model: evaluate less often (`validation_freq`) or on "
        "fewer rows (`validation_steps`)"
    ),
    "python": (
        "runs Python between the programs of short steps "
        "({step_ms[median]:.2g} ms each): run several steps in one program, by "
        "`compile(..., steps_per_execution=16)` or a loop in `run`, or use "
        "larger batches"
    ),
    "together": (
        "runs Python between the programs of {steps_per_program:.3g} short "
        "steps ({step_ms[median]:.2g} ms each): use larger batches, or more "
        "steps in one program"
    ),
    "eager": (
        "runs the operations of each step one after the other "
        "(`run_eagerly=True`): compile the model without `run_eagerly`"
    ),
    "program": (
        "is spent in the step's programs, so the steps are as fast as the "
        "devices: use more devices, or see where a step's time goes with "
        "`keras-strategies plan`"
    ),
}


def write_advice(figures: Mapping[str, Any]) -> str:
    """Returns one sentence on the largest cause of lost time.

    Args:
      figures: The figures of a run.
    """
    # A single program that still ran at its launch has times, but no input.
    if not figures.get("shares") or not figures.keys() >= _NEEDED:
        return "Too few steps were trained to show where their time goes."
    shares = dict(figures["shares"])
    slow = figures.get("processes", _NO_PROCESS)
    if slow["input_ms"] >= _SHORT_MS:
        shares["input"] = max(shares["input"], slow["input_share"])
    elif figures["input_ms"] < _SHORT_MS:
        # To place a batch takes this time, however fast the data are read.
        shares["python"] += shares.pop("input")
    shares["process"] = slow["extra_share"] - slow["input_share"]
    if not figures.get("is_eager"):
        # Other programs are compiled once.
        again = figures["compilations"]["step_seconds"] / figures["seconds"]
        shares["compile"] = min(shares["compile"], again)
        if figures["idle"] < _MIN_IDLE:
            shares.pop("python")
    program = shares.pop("program")
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] < _MIN_SHARE:
        worst, shares = "program", {"program": program}
    facts, kind = _refine(worst, figures)
    sentence = _SENTENCES[kind].format_map({**figures, **facts})
    return f"{100 * shares[worst]:.0f} % of the time {sentence}."


def _refine(
    worst: str, figures: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """Returns what a sentence needs beside the figures, and its key."""
    facts = {"where": ""}
    if worst == "input":
        slow = figures.get("processes")
        if slow is not None and slow["extra_ms"] > slow["input_ms"] / 2:
            facts["where"] = f" on process {slow['slowest']}"
    elif worst in ("compile", "python") and figures.get("is_eager"):
        return facts, "eager"
    elif worst == "python" and figures.get("steps_per_program", 1) > 1:
        return facts, "together"
    elif worst == "compile":
        causes = [one["cause"] for one in figures["compilations"]["causes"]]
        shapes = [c.removeprefix(SHAPE) for c in causes if c.startswith(SHAPE)]
        facts["shapes"] = "; ".join(shapes[:_MAX_SHAPES])
        others = [c for c in causes if c.startswith(EXECUTION)]
        facts["executions"] = ", ".join(others[:_MAX_SHAPES])
        if shapes or others:
            return facts, "shapes" if shapes else "executions"
    return facts, worst
