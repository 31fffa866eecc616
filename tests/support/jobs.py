"""Jobs of several processes on this machine."""

import importlib
import os

from keras_strategies.testing import run_processes
from tests.support.commands import WITHOUT_PACKAGES


def values_of(target, count, *args, **options):
    """What a function returns in each of a job's processes.

    Args:
      target: The function: "multi_process.faults:run", a module of `tests`.
      count: How many processes.
      args: What it is called with; a path comes as text.
      options: See `run_and_list_results`.
    """
    (values,) = values_of_each(count, (target, *args), **options)
    return values


def values_of_each(count, *calls, **options):
    """What several calls return in each process of one job.

    Args:
      count: How many processes.
      calls: For each call the function, and what it is called with.
      options: See `run_and_list_results`.

    Returns:
      For each call, the values of the processes.
    """
    values = [
        result.value
        for result in run_and_list_results(count, *calls, **options)
    ]
    return [list(call_values) for call_values in zip(*values, strict=True)]


def run_and_list_results(
    count, *calls, devices=2, uses=(), timeout_s=400, **options
):
    """The results of a job's processes; their values are those of all calls.

    Args:
      count: How many processes.
      calls: For each call the function, and what it is called with.
      devices: Virtual devices of each process.
      uses: Which of sklearn and tensorflow the functions use.
    """
    calls = [[target, *map(_as_text, args)] for target, *args in calls]
    missing = {"sklearn", "tensorflow"}.difference(uses)
    return run_processes(
        "tests.support.jobs:call_each",
        count,
        args=[calls],
        devices_per_process=devices,
        env={WITHOUT_PACKAGES: " ".join(missing)},
        timeout_s=timeout_s,
        **options,
    )


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
