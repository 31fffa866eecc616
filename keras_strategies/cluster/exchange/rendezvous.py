"""A meeting of all processes of a job before `jax.distributed` starts.

JAX ends a process, uncatchably and without names, where one is missing, there
twice, or of another opinion about their number. So all meet on the chief's
address first, over plain TCP: each says who it is, and all hear the same: go
on, or what is wrong. The port is free again for JAX's coordination service
when they part.

Where the processes share a secret, each proves to the other that it has it,
and who cannot is a stranger; without one nothing that a stranger says is
believed but who it claims to be. This guards the meeting alone: the network
has to be trusted, as JAX's service and gloo need it.

What is said, a line of JSON each:
  a process: hello (and a nonce, where it has a secret);
  process 0, where it has a secret: its nonce, and its proof;
  a process: its proof;
  process 0: how long it waits; at last its verdict (each with a proof).
"""

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.addresses import join_few
from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.greetings import (
    MAX_BYTES,
    MOST,
    NOT_THERE,
    PROCESS,
    PROCESS_0,
    SAME,
    SET,
    as_line,
    message_in,
    parsed,
    proof_of,
    readable,
    shown,
)
from keras_strategies.cluster.exchange.job_secret import VARIABLE, Secret
from keras_strategies.cluster.exchange.joining import join

# Connections that have not said who they are: so many, and each for so long.
# More of them wait until one is gone: no stranger takes a process's time.
_MAX_PENDING = 512
_PENDING_S = 5.0
# Until the next try, where this process has no file left for a connection.
_NO_FILES_S = 0.05
# What a verdict may take beyond the time for all to come.
_GRACE_S = 2.0
# How long to wait for others once something is wrong, to inform them too.
_LINGER_S = 5.0


class RendezvousError(RuntimeError):
    """The processes of a job did not meet as they should."""


def meet(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    facts: Mapping[str, Any],
    timeout_s: float,
    problem: str = "",
    bind_address: str | None = None,
    names: Sequence[str] = (),
    secret: Secret | None = None,
) -> None:
    """Waits until all processes are there and agree. Collective.

    Args:
      address: `host:port` of process 0, where all meet.
      process_id: This process's number.
      num_processes: How many there are, in this process's opinion.
      facts: What must be the same in all: versions, the strategy. What JSON
        can hold.
      timeout_s: How long to wait for all, in seconds.
      problem: Why this process cannot continue, sent to all; or nothing.
      bind_address: Where process 0 listens, if not at `address`.
      names: The processes for messages, in the order of their numbers.
      secret: What all prove that they share, if anything.

    Raises:
      RendezvousError: some did not come, one came twice, they differ, or one
        cannot continue. All that are there raise the same text; but for a
        process without the secret of process 0, which alone is informed.
    """
    if num_processes == 1:
        return
    hello = {
        "process": process_id,
        "count": num_processes,
        "facts": dict(facts),
        "problem": problem,
    }
    if process_id == 0:
        host, port = split(bind_address or address)
        verdict = _Host(hello, names, secret).run(host, port, timeout_s)
    else:
        verdict = join(split(address), hello, timeout_s, secret)
    if verdict:
        raise RendezvousError(verdict)


def split(address: str) -> tuple[str, int]:
    """The host and the port of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclasses.dataclass
class _Pending:
    """A connection to process 0 that has not shown who it is."""

    end: float
    text: bytes = b""
    # Of who said it, and is to prove the secret: its words, and both nonces.
    hello: dict[str, Any] | None = None
    words: bytes = b""
    nonces: tuple[str, str] = ("", "")


class _Host:
    """Process 0: receives from all, finds what is wrong, sends it to all."""

    def __init__(
        self,
        hello: dict[str, Any],
        names: Sequence[str],
        secret: Secret | None,
    ) -> None:
        self._secret = secret
        self._count = self._most = hello["count"]
        self._names = names
        self._end = 0.0
        self._hellos: dict[int, dict[str, Any]] = {0: hello}
        # Who has not shown yet who it is, the oldest first.
        self._pending: dict[socket.socket, _Pending] = {}
        # The nonces by which the message to each is proved.
        self._joined: dict[socket.socket, tuple[str, str]] = {}
        self._unproved: set[int] = set()
        self._problem = ""
        if hello["problem"]:
            self._problem = f"{self._name(0)}: {hello['problem']}"

    def run(self, host: str, port: int, timeout_s: float) -> str:
        """Returns what is wrong, or an empty text."""
        self._end = time.monotonic() + timeout_s
        if self._problem:
            self._end = min(self._end, time.monotonic() + _LINGER_S)
        with contextlib.ExitStack() as stack:
            try:
                server = socket.create_server(
                    (host, port),
                    family=_family(host),
                    backlog=max(self._count, _MAX_PENDING),
                )
            except OSError as error:
                raise RendezvousError(
                    f"Process 0 cannot listen at {host}:{port}. Its address "
                    "must be one of this machine, with a free port. Received: "
                    f"{error.strerror or error}. Look for another job on the "
                    "port, or for the address of another machine."
                ) from error
            stack.enter_context(server)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            server.setblocking(False)
            stack.callback(self._close)
            listens = False
            while len(self._hellos) < self._most and self._left() > 0:
                if listens != (len(self._pending) < _MAX_PENDING):
                    listens = not listens
                    if listens:
                        self._selector.register(server, selectors.EVENT_READ)
                    else:
                        self._selector.unregister(server)
                for key, _ in self._selector.select(self._next_s()):
                    if key.fileobj is server:
                        self._accept(server)
                    elif key.fileobj in self._pending:
                        self._read(key.fileobj)
                self._hang_up_on_late_ones()
            verdict = self._problem or self._missing(timeout_s)
            self._send_verdict(verdict)
        return verdict

    def _left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def _next_s(self) -> float:
        """Until when to wait for somebody to say something."""
        ends = [pending.end for pending in self._pending.values()]
        until = min([self._end, *ends[:1]])
        return max(until - time.monotonic(), 0.0)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_NO_FILES_S)
            return
        connection.setblocking(False)
        self._pending[connection] = _Pending(time.monotonic() + _PENDING_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hang_up_on_late_ones(self) -> None:
        now = time.monotonic()
        for connection, pending in list(self._pending.items()):
            if pending.end > now:
                return
            self._leave(connection)

    def _read(self, connection: Any) -> None:
        try:
            data = connection.recv(MAX_BYTES)
        except OSError:
            data = b""
        pending = self._pending[connection]
        pending.text += data
        if not data or len(pending.text) > MAX_BYTES:
            self._leave(connection)
        elif pending.text.endswith(b"\n"):
            text, pending.text = pending.text, b""
            if pending.hello is None:
                self._receive(connection, pending, text)
            else:
                self._check_proof(connection, pending, text)

    def _receive(
        self, connection: socket.socket, pending: _Pending, text: bytes
    ) -> None:
        hello = parsed(text)
        if hello is None:  # A stranger: a port scanner, a health check.
            self._leave(connection)
            return
        nonce = hello.get("nonce")
        if self._secret is None:
            self._take(connection, hello, pending.nonces)
            return
        if nonce is None:
            self._note_unproved(hello)
            self._send(connection, {"verdict": NOT_THERE})
            self._leave(connection)
            return
        pending.hello, pending.words = hello, text
        pending.nonces = job_secret.make_nonce(), nonce
        proof = self._secret.proof(PROCESS_0, pending.nonces, text)
        challenge = {"nonce": pending.nonces[0], "proof": proof}
        self._send(connection, challenge)

    def _check_proof(
        self, connection: socket.socket, pending: _Pending, text: bytes
    ) -> None:
        message = message_in(text) or {}
        assert self._secret is not None
        assert pending.hello is not None
        proof = self._secret.proof(PROCESS, pending.nonces, pending.words)
        if job_secret.is_same(message.get("proof"), proof):
            self._take(connection, pending.hello, pending.nonces)
        else:
            self._leave(connection)

    def _take(
        self,
        connection: socket.socket,
        hello: dict[str, Any],
        nonces: tuple[str, str],
    ) -> None:
        """Believes who a process says it is."""
        self._selector.unregister(connection)
        del self._pending[connection]
        self._joined[connection] = nonces
        self._send(connection, {"left_s": min(self._left(), MOST)})
        process = hello["process"]
        problem = self._problem_of(process, hello)
        self._hellos.setdefault(process, hello)
        if problem and not self._problem:
            self._problem = problem
            self._most = max(self._most, hello["count"])
            self._end = min(self._end, time.monotonic() + _LINGER_S)

    def _send(self, connection: socket.socket, words: dict[str, Any]) -> None:
        nonces = self._joined.get(connection)
        if self._secret is not None and nonces is not None:
            words |= {"proof": proof_of(self._secret, nonces, words)}
        with contextlib.suppress(OSError):
            connection.sendall(as_line(words))

    def _problem_of(self, process: int, hello: dict[str, Any]) -> str:
        if "nonce" in hello and self._secret is None:
            return (
                f"{SAME}Received: one in {self._name(process)}, and none in "
                f"process 0. {SET}"
            )
        if hello["count"] != self._count:
            return (
                "All processes must be given the same number of processes. "
                f"Received: {self._count} in process 0, {hello['count']} in "
                f"{self._name(process)}. Give all the same cluster."
            )
        if not 0 <= process < self._count:
            return (
                "The processes of a job are numbered from 0. Received: process "
                f"{process} of {self._count}. Give each its own number."
            )
        if process in self._hellos:
            return (
                "Each process of a job has a number of its own. Received: two "
                f"processes that say they are {self._name(process)}. Give each "
                "its own task index, and end processes of earlier runs."
            )
        if hello["problem"]:
            return f"{self._name(process)}: {readable(hello['problem'])}"
        mine = self._hellos[0]["facts"]
        other = hello["facts"]
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                return (
                    f"All processes must have the same {readable(name)}. "
                    f"Received: {shown(mine.get(name))} in process 0, "
                    f"{shown(other.get(name))} in {self._name(process)}. Start "
                    "all from one environment and one script."
                )
        return ""

    def _missing(self, timeout_s: float) -> str:
        missing = [i for i in range(self._count) if i not in self._hellos]
        if not missing:
            return ""
        names = join_few([self._name(i) for i in missing])
        unproved = join_few(
            [self._name(i) for i in missing if i in self._unproved]
        )
        others = (
            f" except a process that claimed to be {unproved} and did not "
            f"prove the job's {VARIABLE}"
            if unproved
            else ""
        )
        return (
            f"All {self._count} processes must start within {timeout_s:.0f} s. "
            f"Received: nothing from {names}{others}. Look at the logs there, "
            "whether it was started, and whether it reaches process 0."
        )

    def _name(self, process: int) -> str:
        if 0 <= process < len(self._names):
            return f"process {process} ({self._names[process]})"
        return f"process {process}"

    def _send_verdict(self, verdict: str) -> None:
        for connection in self._joined:
            connection.settimeout(_GRACE_S)
            self._send(connection, {"verdict": verdict})
        # They close first, so that the port is not kept by the system.
        end = time.monotonic() + _GRACE_S
        for connection in self._joined:
            with contextlib.suppress(OSError):
                connection.settimeout(max(end - time.monotonic(), 0.001))
                connection.recv(1)

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        pending = self._pending.pop(connection)
        if pending.hello is not None:
            self._note_unproved(pending.hello)
        connection.close()

    def _note_unproved(self, hello: dict[str, Any]) -> None:
        # Of others it need not be known, and strangers may name any number.
        if 0 <= hello["process"] < self._count:
            self._unproved.add(hello["process"])

    def _close(self) -> None:
        for connection in [*self._pending, *self._joined]:
            connection.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
