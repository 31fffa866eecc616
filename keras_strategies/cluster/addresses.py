"""Addresses and numbers in environment variables, and free ports."""

import random
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

MAX_TASKS = 1_000_000
"""The exclusive upper bound of task indices."""

MAX_PORT = 65535
"""The highest port number."""

_MAX_SHOWN = 60
_MAX_NAMES = 8
_MAX_HOST = 253
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_FIX = "Write it as `host:port`, with an IPv6 address as `[::1]:2222`."


def shorten(value: object) -> str:
    """Returns a value's repr for an error message, truncated."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:
        # Python refuses to convert an int with thousands of digits to a str.
        return f"a number of more than {_MAX_SHOWN} digits"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        value = value[: _MAX_SHOWN + 1]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def join_few(names: Sequence[object]) -> str:
    """Joins at most eight names with commas; "..." replaces the rest."""
    more = ", ..." * (len(names) > _MAX_NAMES)
    return ", ".join(map(str, names[:_MAX_NAMES])) + more


def name_processes(numbers: Sequence[int]) -> str:
    """Formats process numbers as "process 0" or "processes 1, 2"."""
    word = "process" if len(numbers) == 1 else "processes"
    return f"{word} {join_few(numbers)}"


def check_address(address: str, what: str) -> None:
    """Raises an error unless an address has the form `host:port`.

    Args:
      address: A host name, an IPv4 address or an IPv6 address in brackets,
        followed by a colon and a port from 1 to 65535.
      what: The task or process that has the address, for the error message.

    Raises:
      ValueError: if the address does not have this form.
    """
    problem = _find_problem(address)
    if problem:
        raise ValueError(
            f"The address of {what} must be `host:port`, but {problem}. "
            f"Received: {shorten(address)}. {_FIX}"
        )


def is_local(address: str) -> bool:
    """Returns whether an address means a different machine on each machine.

    Args:
      address: A valid `host:port`, such as `localhost:2222`.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ip_address(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost"
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def add_rpc_layer(address: str, rpc_layer: str | None) -> str:
    """Returns `rpc_layer://address`, or the address if no layer is given."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def parse_index(value: object, what: str) -> int:
    """Parses a task's index from an int or from decimal digits.

    Args:
      value: The index, such as 3 or "3". `"03"`, `True` and `3.0` are
        rejected.
      what: The index's name, for the error message.

    Raises:
      TypeError: if `value` is neither an int nor a str.
      ValueError: if the index is not in [0, `MAX_TASKS`).
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            f"{what} must be an integer. Received: {shorten(value)} of type "
            f"{type(value).__name__}. Pass an integer such as 0, 1 or 2."
        )
    index = value if isinstance(value, int) else _parse_digits(value)
    if isinstance(value, str) and str(index) != value:
        index = -1
    if not 0 <= index < MAX_TASKS:
        raise ValueError(
            f"{what} must be from 0 to {MAX_TASKS - 1}. Received: "
            f"{shorten(value)}. The tasks of a job are numbered 0, 1, 2, ..."
        )
    return index


def read_text(environ: Mapping[str, str], name: str, setter: str) -> str:
    """Returns the value of an environment variable that must be set.

    Args:
      environ: The environment variables.
      name: The variable's name.
      setter: The program that sets the variable, for the error message.

    Raises:
      RuntimeError: if the variable is not set, or is empty.
    """
    value = environ.get(name, "")
    if not value:
        raise RuntimeError(
            f"{name} not found in environment. It is normally set by {setter}. "
            f"Received: {'an empty' if name in environ else 'no'} value. "
            "Start the program so that this variable is set, or use the "
            "resolver that fits your cluster (docs/clusters.md)."
        )
    return value


def read_number(
    environ: Mapping[str, str],
    name: str,
    setter: str,
    *,
    minimum: int = 0,
    maximum: int = MAX_TASKS,
) -> int:
    """Returns the integer in an environment variable that must be set.

    Args:
      environ: The environment variables.
      name: The variable's name.
      setter: The program that sets the variable, for the error message.
      minimum: The smallest number allowed.
      maximum: The largest number allowed.

    Raises:
      RuntimeError: if the variable is not set, or is empty.
      ValueError: if its value is not an integer in this range.
    """
    text = read_text(environ, name, setter)
    number = _parse_digits(text)
    if number < 0 or not minimum <= number <= maximum:
        raise ValueError(
            f"{name} must be an integer from {minimum} to {maximum}. Received: "
            f"{shorten(text)}. It is normally set by {setter}. Check whether "
            "something else also sets it."
        )
    return number


def read_port(environ: Mapping[str, str], name: str, setter: str) -> int:
    """Returns the port in an environment variable; see `read_number`."""
    return read_number(environ, name, setter, minimum=1, maximum=MAX_PORT)


def _find_problem(address: str) -> str:
    """Describes what is wrong with an address; returns "" if it is valid."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return "the port is missing"
    if not 1 <= _parse_digits(port) <= MAX_PORT:
        return f"the port is not a number from 1 to {MAX_PORT}"
    if host.startswith("[") and host.endswith("]"):
        is_valid = _is_ip(IPv6Address, host[1:-1])
    elif re.fullmatch(r"[0-9.]+", host):
        is_valid = _is_ip(IPv4Address, host)
    else:
        is_short = len(host) <= _MAX_HOST and ".." not in host
        is_valid = is_short and _HOST.fullmatch(host) is not None
    return "" if is_valid else "the host is neither a name nor an IP address"


def _is_ip(kind: Callable[[str], object], host: str) -> bool:
    try:
        kind(host)
    except ValueError:
        return False
    return True


def _parse_digits(text: str) -> int:
    """Parses a number written in ASCII digits; returns -1 for other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    return int(text) if is_number else -1


# These ports are below the range of ephemeral ports. An outgoing connection
# can therefore not occupy a port between its choice here and its use.
_FREE_PORTS = range(20000, 32000)


def find_free_ports(count: int) -> list[int]:
    """Returns the given number of ports of 127.0.0.1 that are free now."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(_FREE_PORTS, len(_FREE_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            # JAX's service sets the same option. With it, a port in the state
            # TIME_WAIT can be used again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports
