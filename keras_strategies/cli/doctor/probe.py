"""Checks of `doctor` that run in a child process: JAX, devices, all-reduces.

XLA may abort the process, for example because of an unknown flag, and drivers
may hang, but `doctor` must survive and report this. The checks run in stages.
Each stage prints a line of JSON when it is complete, so that the first missing
line shows where the process ended.
"""

import collections
import json
import statistics
import time
from typing import Any

_REPEATS = 5
# As float32 numbers on each device: 4 MiB.
_WIDTH = 1 << 20
_MAX_ERROR = 2000


def main(question: str) -> int:
    """Runs the requested stages of checks, and prints their results.

    Args:
      question: A JSON object with "stages", the names of the stages; "join",
        the attributes of a `TaskInfo` or None; and "timeout_s".

    Returns:
      The exit status: 0, or 1 if a stage raised an error, which is printed.
    """
    request = json.loads(question)
    stages = {
        "jax": _import_jax,
        "join": _join,
        "devices": _describe_devices,
        "all_reduce": _time_all_reduce,
        "keras": _import_keras,
    }
    for name in request["stages"]:
        start = time.perf_counter()
        try:
            answer = stages[name](request)
        except Exception as error:
            text = str(error)[:_MAX_ERROR]
            answer = {"kind": type(error).__name__, "error": text}
        else:
            answer["seconds"] = time.perf_counter() - start
        print("\n" + json.dumps({"stage": name, **answer}), flush=True)
        if "error" in answer:
            return 1
    return 0


def _import_jax(request: Any) -> dict[str, Any]:
    import jax

    return {"version": jax.__version__}


def _import_keras(request: Any) -> dict[str, Any]:
    import keras_strategies

    for name in dir(keras_strategies):
        getattr(keras_strategies, name)
    return {}


def _join(request: Any) -> dict[str, Any]:
    """Joins the job; if "join" is None, JAX itself detects the cluster."""
    import jax

    from keras_strategies.cluster.spec import TaskInfo
    from keras_strategies.job import bootstrap

    join, timeout_s = request["join"], request["timeout_s"]
    if join is None:
        limit = max(int(timeout_s), 1)
        jax.distributed.initialize(initialization_timeout=limit)
    else:
        join["addresses"] = tuple(join["addresses"])
        bootstrap.join(
            TaskInfo(**join), strategy="none (doctor)", timeout_s=timeout_s
        )
    return {}


def _describe_devices(request: Any) -> dict[str, Any]:
    """Describes the devices of all processes."""
    import jax

    kinds = collections.Counter(
        d.platform + f" ({d.device_kind})" * (d.device_kind != d.platform)
        for d in jax.devices()
    )
    return {
        "kinds": [f"{count} x {kind}" for kind, count in sorted(kinds.items())],
        "num_processes": jax.process_count(),
    }


def _time_all_reduce(request: Any) -> dict[str, Any]:
    """Times and checks a sum over all devices of the job. Collective."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    sharded = NamedSharding(mesh, PartitionSpec("replica"))
    replicated = NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda rows: rows.sum(0), out_shardings=replicated)
    count = mesh.size

    def make_row(index: Any) -> np.ndarray:
        # Each device has its number, from 1.
        return np.full((1, _WIDTH), (index[0].start or 0) + 1, np.float32)

    rows = jax.make_array_from_callback((count, _WIDTH), sharded, make_row)
    # The first call includes compilation, so it is not timed.
    total = jax.block_until_ready(add(rows))
    last = float(np.asarray(total.addressable_data(0))[-1])
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(add(rows))
        seconds.append(time.perf_counter() - start)
    if count == 1:
        return {}
    took = f"{statistics.median(seconds) * 1e3:.2f} ms over {count} devices"
    return {"took": took, "is_right": last == count * (count + 1) / 2}
