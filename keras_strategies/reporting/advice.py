"""The sentence that names the main cause of lost time in a run, and a fix."""

from collections.abc import Mapping
from typing import Any

_MIN_SHARE = 0.1
"""The share of the time from which a cause is named."""
_MIN_IDLE = 0.5
"""The share of programs before whose start the devices must have been idle."""
_SHORT_MS = 1.0
"""The time of a batch's input that faster data cannot shorten much."""
_MAX_SHAPES = 3
_NEEDED = {"step_ms", "input_ms", "idle"}

FIRST = "the first step"
SHAPE = "a new shape: "
EXECUTION = "a last execution of "
AGAIN = "a step, for the same shapes"

_SENTENCES = {
    "input": (
        "waits for input: make the data faster to read (more `workers`, "
        "files that are read in parallel, less work for each row), or read it "
        "once into memory"
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
        "shapes, and choose a number of steps in an epoch that is a multiple "
        "of `steps_per_execution`"
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
    "eager": (
        "runs the operations of each step one after the other "
        "(`run_eagerly=True`): compile the model without `run_eagerly`"
    ),
    "program": (
        "is spent in the step's programs, so the steps are as fast as the "
        "devices, or the slowest process: use more devices, or see where a "
        "step's time goes with `keras-strategies plan`"
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
    if figures["input_ms"] < _SHORT_MS:
        # To place a batch takes this time, however fast the data are read.
        shares["python"] += shares.pop("input")
    # Other programs are compiled once.
    causes = {
        one["cause"]: one["seconds"]
        for one in figures["compilations"]["causes"]
        if one["cause"].startswith((SHAPE, EXECUTION, AGAIN))
    }
    if not figures.get("is_eager"):
        again = sum(causes.values()) / figures["seconds"]
        shares["compile"] = min(shares["compile"], again)
        if figures["idle"] < _MIN_IDLE:
            shares.pop("python")
    program = shares.pop("program")
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] < _MIN_SHARE:
        worst, shares = "program", {"program": program}
    kind, new = worst, [name for name in causes if not name.startswith(AGAIN)]
    if worst in ("compile", "python") and figures.get("is_eager"):
        kind = "eager"
    elif worst == "compile" and new:
        kind = "shapes"
    names = (name.removeprefix(SHAPE) for name in new[:_MAX_SHAPES])
    sentence = _SENTENCES[kind].format(shapes="; ".join(names), **figures)
    return f"{100 * shares[worst]:.0f} % of the time {sentence}."
