"""The key-value store of JAX's coordination service.

JAX has no public name for the store's client, nor for the service's address;
this is their only user.
"""

import socket
from typing import Any

import jax

from keras_strategies.cluster.exchange.rendezvous import split

_PROBE_S = 1.0


def client() -> Any:
    """The client of the store.

    Returns:
      JAX's `DistributedRuntimeClient`, whose module has no types.

    Raises:
      RuntimeError: this process is in no job.
    """
    from jax._src import distributed

    found = distributed.global_state.client
    if found is None:
        raise RuntimeError(
            "Several processes need JAX's coordination service. Received: a "
            "strategy over their devices without it. Call "
            "`jax.distributed.initialize` first."
        )
    return found


def is_available() -> bool:
    """Whether this process is part of a job of `jax.distributed`."""
    return jax.distributed.is_initialized()


def is_reachable() -> bool:
    """Whether somebody listens where the service should be.

    False only if the connection is refused: the service's process has ended.
    One that is stopped, or a network that is slow, is no answer.
    """
    address = _address()
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
    """Whether the service's process runs: a server of gRPC speaks first.

    Connections to one that is stopped are accepted still, by the kernel.
    """
    address = _address()
    if address is None:
        return True
    try:
        with socket.create_connection(address, timeout=_PROBE_S) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False


def _address() -> tuple[str, int] | None:
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    return None if address is None else split(address)
