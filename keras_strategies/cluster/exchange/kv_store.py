"""The key-value store of JAX's coordination service.

JAX has no public name for the store's client, nor for the service's address.
Only this module uses the private ones.
"""

import socket
from typing import Any

import jax

from keras_strategies.cluster.exchange.rendezvous import split_address

_PROBE_S = 1.0


def get_client() -> Any:
    """Returns the client of the store.

    Returns:
      JAX's `DistributedRuntimeClient`, whose module has no types.

    Raises:
      RuntimeError: if this process has not joined a job.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "Several processes need JAX's coordination service. Received: a "
            "strategy over their devices without it. Call "
            "`jax.distributed.initialize` first."
        )
    return client


def is_available() -> bool:
    """Returns whether this process is part of a job of `jax.distributed`."""
    return jax.distributed.is_initialized()


def is_reachable() -> bool:
    """Returns whether a process listens at the service's address.

    False only if the connection is refused: the service's process has ended.
    With a stopped process or a slow network the result is True.
    """
    address = _get_address()
    if address is None:
        return True
    try:
        with socket.create_connection(address, timeout=_PROBE_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def is_speaking() -> bool:
    """Returns whether the service's process runs, and is not just stopped.

    The kernel accepts connections for a stopped process, but a running gRPC
    server sends the first bytes.
    """
    address = _get_address()
    if address is None:
        return True
    try:
        with socket.create_connection(address, timeout=_PROBE_S) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False


def _get_address() -> tuple[str, int] | None:
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    return None if address is None else split_address(address)
