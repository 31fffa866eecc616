"""Implements `Strategy.plan`, which plans all candidates in this process."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies._types import Batch
from keras_strategies.planning.compile import candidates as lib
from keras_strategies.planning.compile.compiler import Compiler
from keras_strategies.planning.compile.estimates import write_notes
from keras_strategies.planning.compile.planner import EFFORTS, iter_plans
from keras_strategies.planning.report.table import Plan
from keras_strategies.planning.seam import Strategy, restore_names, shorten

_SCALES = ("replica", "global")


def make_plan(
    strategy: Strategy,
    model: Callable[[], keras.Model],
    batch: Batch,
    topologies: str | Sequence[str] | None,
    strategies: Any,
    *,
    scale: str,
    effort: str,
    progress: bool,
) -> Plan:
    """Implements `Strategy.plan`, which documents the arguments."""
    _check_choice("scale", scale, _SCALES)
    _check_choice("effort", effort, EFFORTS)
    rows = lib.Batch(
        batch, strategy.mesh.num_replicas, is_global=scale == "global"
    )
    if isinstance(model, keras.Model) or not callable(model):
        raise TypeError(
            "A plan needs a function that creates and compiles a new model "
            f"for each candidate. Received: {shorten(model)} of type "
            f"{type(model).__name__}. Pass `make_model`, not `make_model()`."
        )
    candidates = list(
        lib.iter_candidates(strategy, model, rows, topologies, strategies)
    )
    steps = []
    try:
        with (
            contextlib.closing(Compiler()) as compiler,
            _preserve_seeds(),
            restore_names(),
        ):
            for step in iter_plans(candidates, compiler, effort):
                steps.append(step)
                if progress and sys.stderr.isatty():
                    name = f"{step.topology} {step.layout}"
                    print(f"planned {name}", file=sys.stderr)
    except lib.MakingFailed as failed:
        # Raises the error of the user's function instead of `MakingFailed`.
        raise failed.__cause__ or failed from None
    notes = write_notes(step.topology for step in steps)
    return Plan(steps=tuple(steps), notes=notes)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {name}={value!r}. Pass one of them."
        )


@contextlib.contextmanager
def _preserve_seeds() -> Iterator[None]:
    """Restores Python's random state, from which Keras draws seeds, on exit.

    A layer without a seed draws one from Python's `random` module when it is
    created. Unless the state is restored, a plan changes the seeds of layers
    that are created later.
    """
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
