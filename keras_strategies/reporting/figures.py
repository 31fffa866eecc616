"""Computes the figures of a report from what was recorded."""

from collections.abc import Mapping
from typing import Any

from keras_strategies.names.phases import (
    CALLBACKS,
    DEVICE,
    EVALUATE,
    INPUT,
    PROGRAM,
    SAVE,
)
from keras_strategies.reporting.recorder import AGAIN, SHAPE, StepRecorder

_MOST_CAUSES = 8
_MS = 1e3

Figures = dict[str, Any]
"""The figures of a run, as JSON values; `document.FIGURES` is their form."""


def compute_figures(recorder: StepRecorder, now: float) -> Figures:
    """Returns the figures of a run until now, without advice.

    Args:
      recorder: What was recorded.
      now: The time, by the recorder's clock.
    """
    begun = recorder.started_at
    started = now if begun is None else begun
    figures: Figures = {
        "steps": recorder.launched,
        "startup_seconds": started - recorder.began_at,
        "seconds": now - started,
        "saves": recorder.saves,
        "compilations": _list_compilations(recorder),
        "shares": compute_shares(recorder, now),
    }
    if recorder.executions:
        median = recorder.inputs.find_quantile(0.5) or 0.0
        figures["input_ms"] = _MS * median
        figures["idle"] = 1.0 - recorder.ahead / recorder.executions
    speed = compute_speed(recorder)
    if speed:
        speed["step_ms"] |= {
            "median": _MS * (recorder.times.find_quantile(0.5) or 0.0),
            "p95": _MS * (recorder.times.find_quantile(0.95) or 0.0),
        }
    return figures | speed


def compute_speed(recorder: StepRecorder) -> dict[str, Any]:
    """Returns a step's mean time, and rows and tokens per second, if known.

    Callbacks call it in each step, in any thread.
    """
    steps, seconds = recorder.steps, recorder.window_seconds
    if not steps or seconds <= 0:
        return {}
    shapes = recorder.shapes.values()
    share = steps / recorder.launched
    rows = share * (recorder.rows + sum(s.rows * s.steps for s in shapes))
    tokens = recorder.tokens + sum(s.tokens * s.steps for s in shapes)
    tokens *= share
    speed: dict[str, Any] = {
        "step_ms": {"mean": _MS * seconds / steps},
    }
    if rows:
        speed["rows_per_sec"] = rows / seconds
    if tokens:
        speed["tokens_per_sec"] = tokens / seconds
    return speed


def compute_shares(recorder: StepRecorder, now: float) -> dict[str, float]:
    """Returns the shares of the time after start-up; their sum is 1.

    Returns:
      The shares by name: "input", "callbacks", "program" (a step's program is
      started or awaited), "save", "compile", "evaluate", and "python" for the
      rest. Empty if no step has ended.
    """
    if recorder.started_at is None or now <= recorder.started_at:
        return {}
    of = recorder.seconds
    seconds = {
        "input": of[INPUT],
        "callbacks": of[CALLBACKS],
        "program": of[PROGRAM] + of[DEVICE],
        "save": of[SAVE],
        "compile": recorder.compilations.seconds - recorder.compiled_before,
        "evaluate": of[EVALUATE],
    }
    total = now - recorder.started_at
    rest = max(total - sum(seconds.values()), 0.0)
    total = sum(seconds.values()) + rest
    return {
        name: max(spent, 0.0) / total
        for name, spent in {**seconds, "python": rest}.items()
    }


def _list_compilations(recorder: StepRecorder) -> dict[str, Any]:
    causes = recorder.compilations.causes
    longest = sorted(causes, key=lambda name: -causes[name].seconds)
    return {
        "count": sum(cause.count for cause in causes.values()),
        "seconds": recorder.compilations.seconds,
        "step_seconds": sum(
            cause.seconds
            for name, cause in causes.items()
            if name.startswith((SHAPE, AGAIN))
        ),
        "causes": [
            {
                "cause": name,
                "count": causes[name].count,
                "seconds": causes[name].seconds,
            }
            for name in longest[:_MOST_CAUSES]
        ],
    }


def pick_logs(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures that are added to the logs of `fit`."""
    logs: dict[str, float] = {}
    if "step_ms" in figures:
        logs["step_ms"] = figures["step_ms"]["mean"]
    for name in ("rows_per_sec", "tokens_per_sec", "mfu"):
        if name in figures:
            logs[name] = figures[name]
    if figures.get("shares"):
        logs["input_share"] = figures["shares"]["input"]
    return logs
