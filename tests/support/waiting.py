"""Waiting for a state, with a limit."""

import contextlib
import socket
import time


def wait_until(condition, timeout_s=60.0, every_s=0.01):
    """What `condition()` returns as soon as that is true.

    Raises:
      AssertionError: it was not within the limit.
    """
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(every_s)
    return found


def connected(address):
    """A connection to whoever listens at "host:port", as soon as one does."""
    host, _, port = address.rpartition(":")

    def connect():
        with contextlib.suppress(OSError):
            return socket.create_connection((host, int(port)), 2)
        return None

    return wait_until(connect)
