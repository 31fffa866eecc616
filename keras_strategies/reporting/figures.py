"""Computes the figures of a report from what was recorded, and MFU."""

import contextlib
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
    SAVE,
)
from keras_strategies.reporting.advice import AGAIN, EXECUTION, SHAPE
from keras_strategies.reporting.recorder import COMPILE, REPORT, StepRecorder
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.tpu.chips import find_chip
from keras_strategies.watchdog.failure_detector import Heartbeat

_MAX_CAUSES = 8
_MS = 1e3

Figures = dict[str, Any]
"""The figures of a run, as JSON values."""


def compute_figures(recorder: StepRecorder, now: float) -> Figures:
    """Returns the figures of a run until now, without advice.

    Args:
      recorder: What was recorded.
      now: The time, by the recorder's clock.
    """
    begun, of = recorder.started_at, recorder.seconds
    started = now if begun is None else begun
    figures: Figures = {
        "steps": recorder.launched,
        "startup_seconds": started - recorder.began_at,
        "seconds": 0.0 if begun is None else now - begun - of[REPORT],
        "saves": recorder.saves,
        "compilations": _list_compilations(recorder),
        "shares": compute_shares(recorder, now),
    }
    if recorder.executions:
        figures["input_ms"] = _MS * of[INPUT] / recorder.executions
        figures["idle"] = 1.0 - recorder.ahead / recorder.executions
        figures["steps_per_program"] = (
            recorder.launched - recorder.first_steps
        ) / recorder.executions
    speed = compute_speed(recorder)
    if speed:
        median, p95 = np.quantile(
            list(recorder.times),
            (0.5, 0.95),
            weights=list(recorder.times.values()),
            method="inverted_cdf",
        )
        speed["step_ms"] |= {"median": float(_MS * median)}
        speed["step_ms"]["p95"] = float(_MS * p95)
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
    rows = share * sum(s.rows * s.steps for s in shapes)
    tokens = share * sum(s.tokens * s.steps for s in shapes)
    speed: dict[str, Any] = {"step_ms": {"mean": _MS * seconds / steps}}
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
        "compile": of[COMPILE],
        "evaluate": of[EVALUATE],
    }
    rest = now - recorder.started_at - of[REPORT] - sum(seconds.values())
    seconds["python"] = rest
    seconds = {name: max(spent, 0.0) for name, spent in seconds.items()}
    total = sum(seconds.values())
    return {name: spent / total for name, spent in seconds.items()}


def _list_compilations(recorder: StepRecorder) -> dict[str, Any]:
    made = recorder.compilations
    longest = sorted(made.seconds, key=lambda name: -made.seconds[name])
    repeated = (SHAPE, EXECUTION, AGAIN)
    return {
        "count": made.counts.total(),
        "seconds": sum(made.seconds.values()),
        "step_seconds": sum(
            spent
            for name, spent in made.seconds.items()
            if name.startswith(repeated)
        ),
        "causes": [
            {
                "cause": name,
                "count": made.counts[name],
                "seconds": made.seconds[name],
            }
            for name in longest[:_MAX_CAUSES]
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


_MAX_SHAPES = 8


class FlopsCounter:
    """Counts the operations of a model's steps, once for each shape.

    Args:
      model: The model.
      mesh: The mesh of its replicas.
    """

    def __init__(self, model: keras.Model, mesh: ReplicaMesh) -> None:
        self._model = model
        chip = find_chip(mesh.devices[0])
        self.peak = None if chip is None else chip.flops * len(mesh.devices)
        self._flops: dict[Any, float | None] = {}

    def count(self, recorder: StepRecorder) -> None:
        """Counts the operations for shapes that are new. Traces the model."""
        for key, shape in list(recorder.shapes.items())[:_MAX_SHAPES]:
            if key not in self._flops:
                self._flops[key] = None
                # A model that cannot be traced has no operations to report.
                with contextlib.suppress(Exception):
                    self._flops[key] = count_model_flops(self._model, shape.x)

    def compute(self, recorder: StepRecorder) -> dict[str, float]:
        """Returns the operations per second and the MFU, if they are known."""
        steps = total = 0.0
        for key, shape in recorder.shapes.items():
            flops = self._flops.get(key)
            if flops is None:
                return {}
            steps += shape.steps
            total += shape.steps * flops
        if not total or recorder.window_seconds <= 0:
            return {}
        rate = recorder.steps / recorder.window_seconds * total / steps
        found = {"flops_per_sec": rate}
        if self.peak is not None:
            found["mfu"] = rate / self.peak
        return found
