"""Compares the times that processes spend outside of common programs."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from keras_strategies.watchdog.failure_detector import Heartbeat

_MS = 1e3


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
