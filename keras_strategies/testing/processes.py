"""Runs a test function in several processes of a `jax.distributed` job.

All processes run on this machine, on virtual CPU devices, and communicate over
127.0.0.1.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.gpu.xla_flags import XLA_FLAGS, read_flags

_POLL_S = 0.05
_GRACE_S = 20.0
_MAX_OUTPUT = 4000
_PROGRAM = (
    "import sys; from keras_strategies.testing.processes import run; "
    "run(sys.argv[1])"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """The result of one process of `run_processes`.

    Attributes:
      returncode: The exit status; -n if signal n killed the process.
      value: The function's return value, after a round trip through JSON; None
        if the function failed.
      output: The text that the process wrote to stdout and stderr.

    Example:
      ```python
      from keras_strategies import testing

      first, second = testing.run_processes(
          "jobs:train", num_processes=2, must_succeed=False
      )
      assert first.returncode == 0, first.output
      assert first.value == second.value
      ```
    """

    returncode: int
    value: Any
    output: str


def run_processes(
    target: str,
    num_processes: int,
    *,
    args: Sequence[Any] = (),
    devices_per_process: int = 2,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    must_succeed: bool = True,
) -> list[ProcessResult]:
    """Calls a function in several processes of one job, and waits for them.

    Args:
      target: The function, as "package.module:name". A new process in the
        current directory must be able to import it. Its return value must
        be serializable as JSON.
      num_processes: Number of processes. A single process does not join a
        `jax.distributed` job.
      args: Positional arguments for the function, as JSON values.
      devices_per_process: Number of virtual CPU devices in each process.
      timeout_s: Time limit for all processes together, in seconds.
      env: Environment variables to set in the processes, in addition to those
        of this process.
      must_succeed: Whether to raise an error if a process fails.

    Returns:
      The result of each process, in the order of the process ids.

    Raises:
      TimeoutError: if a process does not exit within `timeout_s`. All
        processes are killed before the error is raised.
      RuntimeError: if a process fails and `must_succeed` is true.
      ValueError: if XLA_FLAGS names a file that cannot be read.

    Example:
      ```python
      from keras_strategies import testing

      # The file jobs.py has `def train(steps): ...`, which makes a
      # `ks.MultiWorkerMirroredStrategy()` and returns a number.
      results = testing.run_processes(
          "jobs:train", num_processes=2, args=[10]
      )
      assert results[0].value == results[1].value
      ```
    """
    (port,) = find_free_ports(1)
    address = f"127.0.0.1:{port}"
    environ = _make_environment(devices_per_process, env)
    with tempfile.TemporaryDirectory() as directory:
        paths = [pathlib.Path(directory, str(p)) for p in range(num_processes)]
        running = [
            _start(
                [target, num_processes, index, address, list(args)],
                path,
                environ,
            )
            for index, path in enumerate(paths)
        ]
        try:
            is_late = not _wait(running, timeout_s)
        finally:
            for process in running:
                process.kill()
                process.wait()
        results = list(map(_result, running, paths))
    if is_late:
        raise TimeoutError(
            f"{target!r} must finish within `timeout_s`, but at least one of "
            f"{num_processes} processes was still running after "
            f"{timeout_s:.0f} s. Check their output below, or pass a larger "
            "`timeout_s`."
            f"{_format_outputs(results)}"
        )
    if must_succeed and any(result.returncode for result in results):
        raise RuntimeError(
            f"{target!r} must succeed in all {len(results)} processes, but at "
            "least one exit status is not 0. Check their output below."
            f"{_format_outputs(results)}"
        )
    return results


def _start(
    message: list[Any], path: pathlib.Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    words = json.dumps([*message, str(path.with_suffix(".json"))])
    with open(path.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )


def _make_environment(
    num_devices: int, env: Mapping[str, str] | None
) -> dict[str, str]:
    flags = read_flags(os.environ).split()
    flags = [flag for flag in flags if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={num_devices}")
    path = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        XLA_FLAGS: " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }


def _wait(running: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Waits until all processes have exited, or the time limit is reached.

    After one process has failed, waits at most `_GRACE_S` more seconds for the
    other processes.

    Returns:
      False if the time limit was reached, else True.
    """
    end = time.monotonic() + timeout_s
    failed_at: float | None = None
    while any(process.poll() is None for process in running):
        now = time.monotonic()
        if now > end:
            return False
        if any(process.returncode for process in running):
            failed_at = failed_at or now
            if now - failed_at > _GRACE_S:
                return True
        time.sleep(_POLL_S)
    return True


def _result(
    process: subprocess.Popen[bytes], path: pathlib.Path
) -> ProcessResult:
    result = path.with_suffix(".json")
    value = json.loads(result.read_text("utf-8")) if result.exists() else None
    log = path.with_suffix(".log").read_text("utf-8", errors="replace")
    return ProcessResult(returncode=process.returncode, value=value, output=log)


def _format_outputs(results: list[ProcessResult]) -> str:
    return "".join(
        f"\n--- process {index}, exit status {result.returncode} ---\n"
        f"{result.output[-_MAX_OUTPUT:]}"
        for index, result in enumerate(results)
    )


def run(words: str) -> None:
    """Joins the job and calls the function; each process runs this.

    Args:
      words: The function, its arguments and the job's address, which
        `run_processes` encoded as JSON.
    """
    # Imported here, because the parent process does not need it.
    from keras_strategies.watchdog import watchdog

    target, num_processes, index, address, args, path = json.loads(words)
    try:
        if num_processes > 1:
            import jax

            jax.distributed.initialize(
                address,
                num_processes,
                index,
                coordinator_bind_address=address,
                **watchdog.INITIALIZE_ARGUMENTS,
            )
        module, name = target.split(":")
        value = getattr(importlib.import_module(module), name)(*args)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file)
    except Exception:
        if watchdog.get_runner() is not None:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # `_exit` skips JAX's shutdown barrier, which would wait for the other
        # processes.
        os._exit(1)
