"""Jobs of several processes on this machine."""

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
        args=[os.fspath(a) if isinstance(a, os.PathLike) else a for a in args],
        devices_per_process=devices,
        timeout_s=timeout_s,
        **options,
    )
    return [result.value for result in results]
