"""Dispatch of compiled programs: one at a time on CPU, in one order on GPUs.

XLA's CPU collectives wait for each other in a thread pool. With more virtual
devices than cores, a second program that starts before the first has ended can
take the threads that the first one waits for, and the process is aborted after
40 s. Therefore, on CPU at most one mapped program runs at a time in a process,
even if several strategies or threads start programs. While it runs, the host
can still read the next batch.

GPUs and TPUs queue programs themselves. But XLA starts a program on each GPU of
a process separately. If two threads start programs at the same time, two GPUs
can queue them in different orders, and the collectives of each program then
wait for the other program. Therefore, on GPUs only one thread at a time starts
a program, which does not wait for the program's end.

Programs that span several processes are started by the job's watchdog.

Some CPU programs (jaxlib 0.10) hang if they are read from JAX's cache on disk:
two devices start with different collectives, and each waits for the other
(docs/upstream.md). Programs of the kind in which this was seen are not cached.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.names.phases import DEVICE, PROGRAM, Phase
from keras_strategies.spmd.mesh import ReplicaMesh

_turn = threading.Lock()
_in_flight: jax.Array | None = None
Starter = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]
"""A function of (number of processes, program, arguments).

It starts the program and returns its outputs.
"""
_starter: Starter | None = None


def set_starter(starter: Starter) -> None:
    """Sets the function that starts all programs that span several processes.

    Args:
      starter: The watchdog's function that runs a program.
    """
    global _starter
    _starter = starter


class _Thread(threading.local):
    choice: "CacheChoice | None" = None


_thread = _Thread()


def without_jax_cache() -> contextlib.AbstractContextManager[Any]:
    """Keeps programs that a block compiles out of JAX's cache on disk.

    jax 0.10 writes programs for devices that are not present into the cache,
    but cannot read them back: it warns and compiles again. Other threads still
    use the cache.
    """
    from jax._src import config

    # No program takes so many seconds to compile.
    return config.persistent_cache_min_compile_time_secs(1e9)


class CacheChoice(contextlib.ExitStack):
    """A block in which the trace of a program may call `keep_out_of_cache`.

    The block compiles the program. Each step enters one, so it must be fast.
    """

    def __enter__(self) -> None:
        self._outer = _thread.choice
        _thread.choice = self._outer or self

    def __exit__(self, *error: Any) -> None:
        _thread.choice = self._outer
        super().__exit__(*error)


def keep_out_of_cache(mesh: ReplicaMesh) -> None:
    """Keeps the program that is traced out of JAX's cache, on CPU devices."""
    if mesh.platform == "cpu" and _thread.choice is not None:
        _thread.choice.enter_context(without_jax_cache())


def dispatch(mesh: ReplicaMesh, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled program.

    On a mesh of several CPU devices, it first waits for the previous program.
    On several GPUs, it only waits until other threads have started theirs.

    Args:
      mesh: The replicas that run the program.
      fn: The program. It returns a tuple; the arrays in its first entry (logs
        or outputs) are never donated to another program, so `dispatch` can
        wait for them.
      *args: Arguments of the program.

    Returns:
      The program's result.

    Raises:
      RuntimeError: if another process is about to run a different program.
    """
    with Phase(PROGRAM) as phase, CacheChoice():
        phase.result = _start_in_turn(mesh, fn, args)
    return phase.result


def _start_in_turn(
    mesh: ReplicaMesh, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    global _in_flight
    if mesh.platform == "tpu" or len(mesh.devices) == 1:
        return _start(mesh, fn, args)
    with _turn:
        if mesh.platform != "cpu":
            return _start(mesh, fn, args)
        # Cleared before the wait, so that an error of the previous program is
        # raised only once.
        waited_for, _in_flight = _in_flight, None
        if waited_for is not None and not waited_for.is_deleted():
            with Phase(DEVICE):
                waited_for.block_until_ready()
        result = _start(mesh, fn, args)
        # One output is enough, because all of them become ready together.
        leaves = jax.tree.leaves(result[0]) or jax.tree.leaves(result)
        _in_flight = leaves[0] if leaves else None
        return result


def _start(
    mesh: ReplicaMesh, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    if _starter is None or mesh.num_processes == 1:
        return fn(*args)
    return _starter(mesh.num_processes, fn, args)
