"""Access to the key-value store of JAX's coordination service.

JAX has no public API for the store's client, nor for the service's address.
This is the only module that gets them through JAX's private modules.
"""

import socket
from typing import Any

import jax

from keras_strategies.cluster.exchange.rendezvous import split_address

_PROBE_S = 1.0


def get_client() -> Any:
    """Returns the client of JAX's key-value store.

    Returns:
      JAX's `DistributedRuntimeClient`. Its type is `Any` here, because its
      module has no type annotations.

    Raises:
      RuntimeError: if this process has not joined a job.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "A strategy over several processes needs JAX's coordination "
            "service. This process is not connected to it. Call "
            "`jax.distributed.initialize` before you create the strategy."
        )
    return client


def get_place() -> tuple[int, int]:
    """Returns this process's number, and the number of processes in the job.

    Unlike `jax.process_index`, it does not wait for the devices.
    """
    from jax._src import distributed

    state = distributed.global_state
    return state.process_id, state.num_processes


def is_available() -> bool:
    """Returns whether this process has joined a `jax.distributed` job."""
    return jax.distributed.is_initialized()


def is_reachable() -> bool:
    """Returns whether a process listens at the coordination service's address.

    The result is False only if the connection is refused, which means that the
    service's process has ended. If that process is only stopped, or the
    network is slow, the result is True.
    """
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    if address is None:
        return True
    try:
        with socket.create_connection(split_address(address), timeout=_PROBE_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
