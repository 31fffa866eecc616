"""Dispatch of programs, one at a time on CPU.

XLA's CPU collectives wait for each other in a thread pool. With more virtual
devices than cores, a second program that starts before the first has ended
can take the threads that the first one waits for, and the process is aborted
after 40 s. So on CPU at most one mapped program is in flight, whichever
strategy or thread started it; the host can still read the next batch in the
meantime. GPUs and TPUs queue programs by themselves.

Programs over several processes are started by the job's watchdog.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies._core.mesh import ReplicaMesh

_turn = threading.Lock()
_in_flight: jax.Array | None = None
Starter = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]
"""Calls `(number of processes, program, arguments)`; returns the outputs."""
_starter: Starter | None = None


def set_starter(starter: Starter) -> None:
    """Makes `starter` start all programs over several processes.

    Args:
      starter: The watchdog's function that runs a program.
    """
    global _starter
    _starter = starter


def dispatch(mesh: ReplicaMesh, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled program; on several CPUs, waits for the last one first.

    Args:
      mesh: The replicas that run the program.
      fn: The program; returns a tuple whose first entry (logs, outputs) is
        not donated to another program.
      *args: Arguments of the program.

    Returns:
      The program's result.

    Raises:
      RuntimeError: if another process is about to run a different program.
    """
    global _in_flight
    if mesh.platform != "cpu" or len(mesh.devices) == 1:
        return _start(mesh, fn, args)
    with _turn:
        # Cleared before waiting, so that an error of the previous program is
        # raised only once.
        waited_for, _in_flight = _in_flight, None
        if waited_for is not None and not waited_for.is_deleted():
            waited_for.block_until_ready()
        result = _start(mesh, fn, args)
        # All outputs of a program become ready together.
        leaves = jax.tree.leaves(result[0]) or jax.tree.leaves(result)
        _in_flight = leaves[0] if leaves else None
        return result


def _start(
    mesh: ReplicaMesh, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    if _starter is None or mesh.num_processes == 1:
        return fn(*args)
    return _starter(mesh.num_processes, fn, args)
