"""Computes the figures of a report from what was recorded, and MFU."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_bridge.model_flops import count_model_flops
from keras_strategies.names.phases import (
    CALLBACKS,
    DEVICE,
    EVALUATE,
    INPUT,
    PROGRAM,
    REPORT,
    SAVE,
)
from keras_strategies.reporting.advice import AGAIN, EXECUTION, SHAPE
from keras_strategies.reporting.recorder import COMPILE, StepRecorder
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.tpu.chips import find_chip
from keras_strategies.watchdog.failure_detector import Heartbeat

_MAX_CAUSES = 8
_MAX_SHAPES = 8
_MS = 1e3

Figures = dict[str, Any]
"""The figures of a run, as JSON values."""


def compute_figures(
    recorder: StepRecorder, now: float, peak: float | None = None
) -> Figures:
    """Returns the figures of a run until now, without advice.

    Args:
      recorder: What was recorded.
      now: The time, by the recorder's clock.
      peak: The result of `find_peak`.
    """
    begun, of = recorder.started_at, recorder.seconds
    started = now if begun is None else begun
    figures: Figures = {
        "steps": recorder.launched,
        "startup_seconds": started - recorder.began_at,
        "seconds": 0.0 if begun is None else now - begun - of[REPORT],
        "saves": recorder.saves,
        "compilations": _list_compilations(recorder),
    }
    if recorder.executions:
        figures["input_ms"] = _MS * of[INPUT] / recorder.executions
        figures["idle"] = 1.0 - recorder.ahead / recorder.executions
        steps = recorder.launched - recorder.first_steps
        figures["steps_per_program"] = steps / recorder.executions
    speed = compute_speed(recorder, now, peak)
    if "step_ms" in speed:
        times, counts = list(recorder.times), list(recorder.times.values())
        median, p95 = np.quantile(
            times, (0.5, 0.95), weights=counts, method="inverted_cdf"
        )
        quantiles = {"median": float(_MS * median), "p95": float(_MS * p95)}
        speed["step_ms"] |= quantiles
    return figures | speed


def compute_speed(
    recorder: StepRecorder, now: float, peak: float | None
) -> Figures:
    """Returns the shares, a step's mean time and, if known, other speeds.

    These are the rows, tokens and operations per second, and the MFU. Callbacks
    call it in each step, in any thread. The arguments are those of
    `compute_figures`.
    """
    speed: Figures = {"shares": compute_shares(recorder, now)}
    steps, seconds = recorder.steps, recorder.window_seconds
    if not steps or seconds <= 0:
        return speed
    shapes = list(recorder.shapes.values())
    share = steps / recorder.launched
    speed["step_ms"] = {"mean": _MS * seconds / steps}
    if rows := share * sum(s.rows * s.steps for s in shapes):
        speed["rows_per_sec"] = rows / seconds
    if tokens := share * sum(s.tokens * s.steps for s in shapes):
        speed["tokens_per_sec"] = tokens / seconds
    known = [s.steps * s.flops for s in shapes if s.flops is not None]
    if len(known) == len(shapes) and sum(known):
        mean = sum(known) / sum(s.steps for s in shapes)
        speed["flops_per_sec"] = steps / seconds * mean
        if peak is not None:
            speed["mfu"] = speed["flops_per_sec"] / peak
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
    named = (INPUT, CALLBACKS, PROGRAM, SAVE, COMPILE, EVALUATE)
    seconds = {name: of[name] for name in named}
    seconds[PROGRAM] += of[DEVICE]
    rest = now - recorder.started_at - of[REPORT] - sum(seconds.values())
    seconds["python"] = rest
    seconds = {name: max(spent, 0.0) for name, spent in seconds.items()}
    total = sum(seconds.values())
    return {name: spent / total for name, spent in seconds.items()}


def _list_compilations(recorder: StepRecorder) -> dict[str, Any]:
    seconds, repeated = recorder.compile_seconds, (SHAPE, EXECUTION, AGAIN)
    causes = [
        {"cause": name, "count": recorder.compiled[name], "seconds": spent}
        for name, spent in seconds.items()
    ]
    of_steps = [seconds[name] for name in seconds if name.startswith(repeated)]
    return {
        "count": recorder.compiled.total(),
        "seconds": sum(seconds.values()),
        "step_seconds": sum(of_steps),
        "causes": sorted(causes, key=lambda one: -one["seconds"])[:_MAX_CAUSES],
    }


def pick_logs(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures that are added to the logs of `fit`."""
    names = ("rows_per_sec", "tokens_per_sec", "mfu")
    logs = {name: figures[name] for name in names if name in figures}
    if "step_ms" in figures:
        logs["step_ms"] = figures["step_ms"]["mean"]
    if figures.get("shares"):
        logs["input_share"] = figures["shares"]["input"]
    return logs


def compare_processes(heartbeats: Mapping[int, Heartbeat]) -> dict[str, Any]:
    """Returns the figure "processes": which is slowest, and by how much.

    Args:
      heartbeats: The latest heartbeat of each process.

    Returns:
      A dict with the entry, or without it if fewer than two processes have
      reported steps.
    """
    measured = {p: h for p, h in sorted(heartbeats.items()) if _is_measured(h)}
    if len(measured) < 2:
        return {}
    local = {p: h.local_s / h.steps for p, h in measured.items()}
    slowest = max(local, key=lambda p: local[p])
    others = [seconds for p, seconds in local.items() if p != slowest]
    extra = local[slowest] - statistics.median(others)
    one = measured[slowest]
    return {
        "processes": {
            "count": len(measured),
            "slowest": slowest,
            "extra_ms": _MS * extra,
            "extra_share": min(extra * one.steps / one.steps_s, 1.0),
            "input_ms": _MS * one.input_s / one.steps,
            "input_share": min(one.input_s / one.steps_s, 1.0),
        }
    }


def _is_measured(heartbeat: Heartbeat) -> bool:
    times = heartbeat.steps_s, heartbeat.local_s, heartbeat.input_s
    is_time = all(math.isfinite(x) and x >= 0 for x in times)
    return is_time and heartbeat.steps > 0 and heartbeat.steps_s > 0


def find_peak(mesh: ReplicaMesh) -> float | None:
    """Returns the operations per second of all devices together, if known."""
    chip = find_chip(mesh.devices[0])
    return None if chip is None else chip.flops * len(mesh.devices)


def count_flops(model: keras.Model, recorder: StepRecorder) -> None:
    """Counts the operations of steps of new shapes. Traces the model."""
    for shape in list(recorder.shapes.values())[:_MAX_SHAPES]:
        if shape.x is not None:
            shape.flops = count_model_flops(model, shape.x)
            shape.x = None
