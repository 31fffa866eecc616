"""Starting programs so that the host never runs ahead on CPU.

XLA's CPU collectives wait for each other in a thread pool. With more virtual
devices than cores, a second program that starts before the first has ended
can take the threads the first one waits for, and the process is aborted after
40 s. So on CPU at most one mapped program is in flight, whichever strategy or
thread started it. GPU and TPU queue programs by themselves.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies._core.mesh import ReplicaMesh

_cpu_turn = threading.RLock()


def dispatch(mesh: ReplicaMesh, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled program; on several CPUs returns when it has ended."""
    if mesh.platform != "cpu" or mesh.num_replicas == 1:
        return fn(*args)
    with _cpu_turn:
        result = fn(*args)
        leaves = jax.tree.leaves(result)
        if leaves:
            # All outputs of a program become ready together.
            min(leaves, key=_size).block_until_ready()
        return result


def _size(leaf: jax.Array) -> int:
    return leaf.size
