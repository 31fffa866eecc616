"""Ports of this machine for the processes of a job."""

import random
import socket

_HOST = "127.0.0.1"
# Below the ports that systems give to outgoing connections, one of which could
# take a port between its choice here and its use.
_PORTS = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            # As JAX's service binds: ports in TIME_WAIT can be taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            found.append(port)
    return found
