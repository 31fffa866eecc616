"""The sentence of a report that names where most time is lost, and a cure."""

from collections.abc import Mapping
from typing import Any

_LEAST = 0.1
"""The share of the time from which a cause is named."""
_LEAST_IDLE = 0.5
"""The share of programs before whose start the devices must have been idle."""
_QUICK_MS = 1.0
"""The time of a batch's input that faster data cannot shorten much."""
_NEW = "a new shape: "
_NEEDED = {"step_ms", "input_ms", "idle"}
_NO_PROCESS = {"extra_share": 0.0, "input_share": 0.0, "input_ms": 0.0}

_INPUT = (
    "make the data faster to read (more `workers`, files that are read in "
    "parallel, less work for each row), or read it once into memory"
)


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
    if slow["input_ms"] >= _QUICK_MS:
        shares["input"] = max(shares["input"], slow["input_share"])
    elif figures["input_ms"] < _QUICK_MS:
        # To place a batch takes this time, however fast the data are read.
        shares["python"] += shares.pop("input")
    shares["process"] = slow["extra_share"] - slow["input_share"]
    # Other programs are compiled once.
    again = figures["compilations"]["step_seconds"] / figures["seconds"]
    shares["compile"] = min(shares["compile"], again)
    causes = {
        name: share
        for name, share in shares.items()
        if share >= _LEAST and name != "program"
    }
    if figures["idle"] < _LEAST_IDLE:
        causes.pop("python", None)
    worst = max(causes, key=lambda name: causes[name], default="program")
    percent = f"{100 * shares[worst]:.0f} %"
    return f"{percent} of the time {_WRITERS[worst](figures)}."


def _advise_input(figures: Mapping[str, Any]) -> str:
    slow = figures.get("processes")
    where = ""
    if slow is not None and slow["extra_ms"] > slow["input_ms"] / 2:
        where = f" on process {slow['slowest']}"
    return f"waits for input{where}: {_INPUT}"


def _advise_process(figures: Mapping[str, Any]) -> str:
    slow = figures["processes"]
    return (
        f"waits for process {slow['slowest']}, which spends "
        f"{slow['extra_ms']:.3g} ms a step more in Python than the others: "
        "look at its callbacks, and at other programs on its host"
    )


def _advise_callbacks(figures: Mapping[str, Any]) -> str:
    return (
        "runs callbacks: call the slow ones less often, for example at the "
        "end of an epoch"
    )


def _advise_save(figures: Mapping[str, Any]) -> str:
    return (
        f"waits for checkpoints ({figures['saves']} saves): save less often "
        "(a larger `save_every_steps`, or `save_every_seconds`)"
    )


def _advise_compile(figures: Mapping[str, Any]) -> str:
    causes = figures["compilations"]["causes"]
    shapes = [
        one["cause"].removeprefix(_NEW)
        for one in causes
        if one["cause"].startswith(_NEW)
    ]
    if shapes:
        return (
            f"compiles the step for new shapes ({'; '.join(shapes[:3])}): pad "
            "the batches to a few shapes"
        )
    return (
        "compiles the step again for the same shapes: do not change the model "
        "between steps, and pass Python values that change as arrays"
    )


def _advise_evaluate(figures: Mapping[str, Any]) -> str:
    return (
        "evaluates the model: evaluate less often (`validation_freq`) or on "
        "fewer rows (`validation_steps`)"
    )


def _advise_python(figures: Mapping[str, Any]) -> str:
    return (
        "runs Python between the programs of short steps "
        f"({figures['step_ms']['median']:.2g} ms each): run several steps in "
        "one program, by `compile(..., steps_per_execution=16)` or a loop in "
        "`run`, or use larger batches"
    )


def _advise_program(figures: Mapping[str, Any]) -> str:
    return (
        "is spent in the step's programs, so the steps are as fast as the "
        "devices: use more devices, or see where a step's time goes with "
        "`keras-strategies plan`"
    )


_WRITERS = {
    "input": _advise_input,
    "callbacks": _advise_callbacks,
    "save": _advise_save,
    "compile": _advise_compile,
    "evaluate": _advise_evaluate,
    "python": _advise_python,
    "process": _advise_process,
    "program": _advise_program,
}
