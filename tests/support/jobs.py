"""Jobs of several processes on this machine."""

import importlib
import os

from keras_strategies.testing import run_processes


def values_of(target, count, *args, devices=2, timeout_s=400, **options):
    """What a function returns in each of a job's processes.

    Args:
      target: The function: "multi_process.faults:run", a module of `tests`.
      count: How many processes.
      args: What it is called with; a path comes as text.
      devices: Virtual devices of each process.
    """
    results = run_processes(
        f"tests.{target}",
        count,
        args=list(map(_as_text, args)),
        devices_per_process=devices,
        timeout_s=timeout_s,
        **options,
    )
    return [result.value for result in results]


def values_of_each(count, *calls, **options):
    """What several calls return in each process of one job.

    Args:
      count: How many processes.
      calls: For each call the function, and what it is called with.
      options: Those of `values_of`.

    Returns:
      For each call, the values of the processes.
    """
    calls = [[target, *map(_as_text, args)] for target, *args in calls]
    values = values_of("support.jobs:call_each", count, calls, **options)
    return [list(of_call) for of_call in zip(*values, strict=True)]


def call_each(calls):
    """Calls functions one after the other, in a process of a job."""
    values = []
    for target, *args in calls:
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(f"tests.{module}"), name)
        values.append(function(*args))
    return values


def _as_text(argument):
    is_path = isinstance(argument, os.PathLike)
    return os.fspath(argument) if is_path else argument
