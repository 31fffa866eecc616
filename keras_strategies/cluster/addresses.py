"""Addresses and numbers as the variables of a cluster give them."""

import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address

MAX_TASKS = 1_000_000
"""Indices of tasks are below this."""

MAX_PORT = 65535
"""The greatest number of a port."""

_MAX_SHOWN = 60
_MOST_NAMES = 8
_MAX_HOST = 253
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_CURE = "Write it as `host:port`, with an IPv6 address as `[::1]:2222`."


def shown(value: object) -> str:
    """A value for an error's text: its repr, cut short."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:
        # Python refuses to write a number of thousands of digits.
        return f"a number of more than {_MAX_SHOWN} digits"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        value = value[: _MAX_SHOWN + 1]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def join_few(names: Sequence[object]) -> str:
    """Joins the first of many names for an error: "0, 1, ..."."""
    more = ", ..." * (len(names) > _MOST_NAMES)
    return ", ".join(map(str, names[:_MOST_NAMES])) + more


def name_processes(numbers: Sequence[int]) -> str:
    """Names processes for an error: "process 0", "processes 1, 2"."""
    word = "process" if len(numbers) == 1 else "processes"
    return f"{word} {join_few(numbers)}"


def check_address(address: str, what: str) -> None:
    """Raises unless an address is `host:port`.

    Args:
      address: A host name, an IPv4 address or an IPv6 address in brackets,
        a colon and a port from 1 to 65535.
      what: Whose address it is, for the error.

    Raises:
      ValueError: it is something else.
    """
    fault = _fault_of(address)
    if fault:
        raise ValueError(
            f"The address of {what} is no `host:port`: {fault}. Received: "
            f"{shown(address)}. {_CURE}"
        )


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def with_rpc_layer(address: str, rpc_layer: str | None) -> str:
    """An address as tf's `master()` gives it: `grpc://host:port`."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def parse_index(value: object, what: str) -> int:
    """A task's index from an int or from decimal digits.

    Args:
      value: What was given; `"3"` is 3, `"03"`, `True` and `3.0` are refused.
      what: What it is the index of, for the error.

    Raises:
      TypeError: neither an int nor a text.
      ValueError: not in [0, `MAX_TASKS`).
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            f"{what} is an integer. Received: {shown(value)} of type "
            f"{type(value).__name__}. Write it as 0, 1, 2, ..."
        )
    if isinstance(value, str):
        index = _parse_digits(value)
        if str(index) != value:
            index = -1
    else:
        index = value
    if not 0 <= index < MAX_TASKS:
        raise ValueError(
            f"{what} is from 0 to {MAX_TASKS - 1}. Received: "
            f"{shown(value)}. Count the tasks of a job as 0, 1, 2, ..."
        )
    return index


def read_text(environ: Mapping[str, str], name: str, setter: str) -> str:
    """The value of a variable that must be set.

    Args:
      environ: The environment variables.
      name: Which one.
      setter: Who sets it, for the error.

    Raises:
      RuntimeError: it is not set, or empty.
    """
    value = environ.get(name, "")
    if not value:
        raise RuntimeError(
            f"{name} not found in environment. It is set by {setter}. "
            f"Received: {'an empty value' if name in environ else 'nothing'}. "
            "Start the program that way, or choose the resolver of your "
            "cluster (docs/clusters.md)."
        )
    return value


def read_number(
    environ: Mapping[str, str],
    name: str,
    setter: str,
    *,
    least: int = 0,
    most: int = MAX_TASKS,
) -> int:
    """The whole number that a variable must hold.

    Args:
      environ: The environment variables.
      name: Which one.
      setter: Who sets it, for the error.
      least: The least number allowed.
      most: The greatest number allowed.

    Raises:
      RuntimeError: it is not set, or empty.
      ValueError: it holds something else.
    """
    text = read_text(environ, name, setter)
    number = _parse_digits(text)
    if number < 0 or not least <= number <= most:
        raise ValueError(
            f"{name} is a whole number from {least} to {most}. Received: "
            f"{shown(text)}. It is set by {setter}: look at what else does."
        )
    return number


def read_port(environ: Mapping[str, str], name: str, setter: str) -> int:
    """The port that a variable must hold; raises as `read_number`."""
    return read_number(environ, name, setter, least=1, most=MAX_PORT)


def _fault_of(address: str) -> str:
    """What is wrong with an address; empty if nothing is."""
    if "://" in address:
        return "a scheme such as grpc:// does not belong to it"
    host, colon, port = address.rpartition(":")
    if not colon:
        return "the port is missing"
    if not 1 <= _parse_digits(port) <= MAX_PORT:
        return f"the port is no number from 1 to {MAX_PORT}"
    return _fault_of_host(host)


def _fault_of_host(host: str) -> str:
    if not host:
        return "the host is missing"
    if host.startswith("[") and host.endswith("]"):
        is_ipv6 = _is_ip(IPv6Address, host[1:-1])
        return "" if is_ipv6 else "what is in brackets is no IPv6"
    if ":" in host:
        return "an IPv6 address needs brackets"
    if len(host) > _MAX_HOST or not _HOST.fullmatch(host) or ".." in host:
        return "the host is neither a name nor an IP address"
    if re.fullmatch(r"[0-9.]+", host) and not _is_ip(IPv4Address, host):
        return "the host is no IPv4 address"
    return ""


def _is_ip(kind: Callable[[str], object], host: str) -> bool:
    try:
        kind(host)
    except ValueError:
        return False
    return True


def _parse_digits(text: str) -> int:
    """The number that ASCII digits mean; -1 for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    return int(text) if is_number else -1
