"""A search for free ports on this machine, for the processes of a local job."""

import random
import socket

_HOST = "127.0.0.1"
# These ports are below the range of ephemeral ports. An outgoing connection
# can therefore not occupy a port between its choice here and its use.
_PORTS = range(20000, 32000)


def find_free_ports(count: int) -> list[int]:
    """Returns the given number of ports of 127.0.0.1 that are free now."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            # JAX's service sets the same option. With it, a port in the state
            # TIME_WAIT can be used again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            ports.append(port)
    return ports
