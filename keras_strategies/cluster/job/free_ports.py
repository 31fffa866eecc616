"""Free ports of this machine, for the processes of a job."""

import random
import socket

_HOST = "127.0.0.1"
# Below the ephemeral ports of outgoing connections, one of which could take a
# port between its choice here and its use.
_PORTS = range(20000, 32000)


def find_free_ports(count: int) -> list[int]:
    """Returns different ports of 127.0.0.1 that are free now."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            # JAX's service binds like this: ports in TIME_WAIT are usable.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            ports.append(port)
    return ports
