"""Checks of `doctor` that run in a child process: JAX, devices, all-reduces.

XLA may abort the process, for example because of an unknown flag, and drivers
may hang, but `doctor` must survive and report this. The checks run in stages.
Each stage writes a line of JSON to a file when it is complete, so that the
first missing line shows where the process ended.
"""

import collections
import json
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

_REPEATS = 5
_SMALL = 1
_LARGE = 1 << 20  # As float32 numbers: 4 MiB on each device.
_LONGEST_ERROR = 2000


def main(path: str, question: str) -> int:
    """Runs the requested stages of checks; writes their results to a file.

    Args:
      path: The file to write to.
      question: A JSON object with "stages", the names of the stages; "join",
        the attributes of a `TaskInfo` or None; and "timeout_s".

    Returns:
      The exit status: 0, or 1 if a stage raised an error. The error is written
      to the file.
    """
    request = json.loads(question)
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "jax": _import_jax,
        "join": lambda: _join(request["join"], request["timeout_s"]),
        "devices": _describe_devices,
        "all_reduce": _time_all_reduce,
        "keras": _import_keras,
    }
    with open(path, "w", encoding="utf-8", buffering=1) as file:
        for name in request["stages"]:
            file.write(json.dumps({"stage": name, "begins": True}) + "\n")
            start = time.perf_counter()
            try:
                answer = stages[name]()
            except Exception as error:
                kind, text = type(error).__name__, str(error)[:_LONGEST_ERROR]
                answer = {"kind": kind, "error": text}
                file.write(json.dumps({"stage": name, **answer}) + "\n")
                return 1
            answer["seconds"] = time.perf_counter() - start
            file.write(json.dumps({"stage": name, **answer}) + "\n")
    return 0


def _import_jax() -> dict[str, Any]:
    import jax

    return {"version": jax.__version__}


def _import_keras() -> dict[str, Any]:
    import keras_strategies

    for name in dir(keras_strategies):
        getattr(keras_strategies, name)
    return {}


def _join(join: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """Joins the job; if `join` is None, JAX itself detects the cluster."""
    import jax

    from keras_strategies.cluster.spec import TaskInfo
    from keras_strategies.job import bootstrap

    if join is None:
        limit = max(int(timeout_s), 1)
        jax.distributed.initialize(initialization_timeout=limit)
    else:
        join["addresses"] = tuple(join["addresses"])
        bootstrap.join(
            TaskInfo(**join), strategy="none (doctor)", timeout_s=timeout_s
        )
    return {"process": jax.process_index()}


def _describe_devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    kinds = collections.Counter((d.platform, d.device_kind) for d in devices)
    counts = collections.Counter(d.process_index for d in devices)
    return {
        "kinds": [[*kind, count] for kind, count in sorted(kinds.items())],
        "by_process": [counts[index] for index in sorted(counts)],
        "process": jax.process_index(),
        "hosts": _gather_hosts(),
    }


def _gather_hosts() -> list[str]:
    """Returns the host name of each process. Collective."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    name = socket.gethostname()
    if jax.process_count() == 1:
        return [name]
    row = np.frombuffer(name.encode()[:64].ljust(64, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def _time_all_reduce() -> dict[str, Any]:
    """Times and checks a sum over all devices of the job. Collective."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    sharded = NamedSharding(mesh, PartitionSpec("replica"))
    replicated = NamedSharding(mesh, PartitionSpec())
    add = jax.jit(lambda rows: rows.sum(0), out_shardings=replicated)
    count = mesh.size
    answer: dict[str, Any] = {"devices": count, "repeats": _REPEATS}
    for name, width in (("small", _SMALL), ("large", _LARGE)):
        rows = jax.make_array_from_callback(
            (count, width), sharded, lambda index, w=width: _make_row(index, w)
        )
        # The first call includes compilation, so it is not timed.
        total = jax.block_until_ready(add(rows))
        last = float(np.asarray(total.addressable_data(0))[-1])
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(add(rows))
            seconds.append(time.perf_counter() - start)
        answer[name] = {
            "bytes": 4 * width,
            "ms": statistics.median(seconds) * 1e3,
            "is_right": last == count * (count + 1) / 2,
        }
    return answer


def _make_row(index: Any, width: int) -> Any:
    """Creates the row of one device, filled with its number (from 1)."""
    import numpy as np

    first = index[0].start or 0
    return np.full((1, width), first + 1, np.float32)
