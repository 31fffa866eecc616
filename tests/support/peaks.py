"""Peaks of this process's memory, from Linux's /proc."""

import pathlib


def resident_mb():
    """This process's memory now, and the most since `forget_peak`."""
    status = pathlib.Path("/proc/self/status").read_text("utf-8").splitlines()
    values = dict(line.split(":", 1) for line in status)
    return [int(values[k].split()[0]) / 1024 for k in ("VmRSS", "VmHWM")]


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5", "ascii")


def measure_added(function):
    """What a function returns, and the MB that it adds for a while."""
    forget_peak()
    before, _ = resident_mb()
    result = function()
    _, peak = resident_mb()
    return result, peak - before
