"""The rendezvous of all processes of a job before `jax.distributed` starts.

If a process is missing, starts twice or expects a different number of
processes, JAX aborts the other processes. They cannot catch this, and the
message does not name the process at fault. So before JAX starts, all processes
connect to the chief's address over TCP and describe themselves. All receive
the same verdict: to continue, or an error. Afterwards the port is free again
for JAX's coordination service.

If the processes share a secret, each side proves to the other that it knows
the secret, and connections without a proof are closed. Without a secret, any
client can claim to be a process. The secret protects only the rendezvous:
JAX's service and gloo need a trusted network anyway.

Each message is a line of JSON. In order, the senders and their messages are:
  each process: its description, "hello" (and a nonce, if it has a secret);
  process 0, if it has a secret: a nonce and its proof;
  each process, if it has a secret: its proof;
  process 0: how long it will wait; finally the verdict (each with a proof, if
  it has a secret).
"""

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.addresses import join_few, shorten
from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.greetings import (
    MAX,
    MAX_BYTES,
    OTHER_SECRET,
    PROCESS,
    PROCESS_0,
    clean_text,
    encode_line,
    parse_hello,
    parse_line,
    prove_message,
)
from keras_strategies.cluster.exchange.job_secret import VARIABLE, Secret
from keras_strategies.cluster.exchange.joining import join

# How many connections may be pending (not yet identified), and for how long.
# Others wait in the socket's backlog, so strangers cannot block processes.
_MAX_PENDING = 512
_PENDING_S = 5.0
# The pause before another try when this process is out of file descriptors.
_NO_FILES_S = 0.05
# The verdict may still arrive this long after the rendezvous has timed out.
_GRACE_S = 2.0
# How long to wait, after an error, for processes that have not yet connected.
_LINGER_S = 5.0


class RendezvousError(RuntimeError):
    """Raised if the processes of a job cannot start together."""


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
    """Waits until all processes have arrived and agree. Collective.

    Args:
      address: `host:port` of process 0, to which all processes connect.
      process_id: This process's number.
      num_processes: The number of processes that this process expects.
      facts: A mapping from names to JSON values that must be the same in all
        processes, such as versions and the strategy's name.
      timeout_s: How long to wait for all processes, in seconds.
      problem: If this process cannot continue, the text of the error, which is
        sent to all processes; otherwise "".
      bind_address: The address at which process 0 listens, if not `address`.
      names: The processes' names for errors, in the order of their numbers.
      secret: The secret that all processes must know, or None.

    Raises:
      RendezvousError: if a process is missing, arrived twice, has other facts
        or cannot continue. All processes that arrived raise the same error,
        but a process with a wrong secret raises a separate one.
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
        host, port = split_address(bind_address or address)
        verdict = _Host(hello, names, secret).run(host, port, timeout_s)
    else:
        verdict = join(split_address(address), hello, timeout_s, secret)
    if verdict:
        raise RendezvousError(verdict)


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Returns a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


@dataclasses.dataclass
class _Pending:
    """A connection to process 0 whose client has not yet identified itself."""

    end: float
    text: bytes = b""
    # While process 0 waits for the client's proof: the hello, parsed and as it
    # was sent, and both nonces.
    hello: dict[str, Any] | None = None
    line: bytes = b""
    nonces: tuple[str, str] = ("", "")


class _Host:
    """The server in process 0, to which all processes of the job connect."""

    def __init__(
        self,
        hello: dict[str, Any],
        names: Sequence[str],
        secret: Secret | None,
    ) -> None:
        self._secret = secret
        self._count = self._max = hello["count"]
        self._names = names
        self._end = 0.0
        self._hellos: dict[int, dict[str, Any]] = {0: hello}
        # Connections of clients that are not yet identified, oldest first.
        self._pending: dict[socket.socket, _Pending] = {}
        # Identified connections, with the nonces for signing messages to them.
        self._joined: dict[socket.socket, tuple[str, str]] = {}
        self._problem = ""
        if hello["problem"]:
            self._problem = f"{self._name(0)}: {hello['problem']}"

    def run(self, host: str, port: int, timeout_s: float) -> str:
        """Runs the rendezvous; returns the verdict: "" or an error's text."""
        self._end = time.monotonic() + timeout_s
        if self._problem:
            self._end = min(self._end, time.monotonic() + _LINGER_S)
        with contextlib.ExitStack() as stack:
            try:
                backlog = max(self._count, _MAX_PENDING)
                server = listen(host, port, backlog=backlog)
            except OSError as error:
                raise RendezvousError(
                    f"Process 0 cannot listen at {host}:{port}. Its address "
                    "must belong to this machine, and its port must be free. "
                    f"Received: {error.strerror or error}. Check the address, "
                    "and check whether another job uses the port."
                ) from error
            stack.enter_context(server)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            server.setblocking(False)
            stack.callback(self._close)
            listens = False
            while len(self._hellos) < self._max and self._compute_left_s() > 0:
                # Stops accepting while too many connections are pending.
                if listens != (len(self._pending) < _MAX_PENDING):
                    listens = not listens
                    if listens:
                        self._selector.register(server, selectors.EVENT_READ)
                    else:
                        self._selector.unregister(server)
                for key, _ in self._selector.select(self._compute_wait_s()):
                    if key.fileobj is server:
                        self._accept(server)
                    elif key.fileobj in self._pending:
                        self._read(key.fileobj)
                self._drop_late()
            verdict = self._problem or self._describe_missing(timeout_s)
            self._send_verdict(verdict)
        return verdict

    def _compute_left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def _compute_wait_s(self) -> float:
        """Returns the seconds until the next deadline."""
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

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection, pending in list(self._pending.items()):
            if pending.end > now:
                return
            self._drop(connection)

    def _read(self, connection: Any) -> None:
        try:
            data = connection.recv(MAX_BYTES)
        except OSError:
            data = b""
        pending = self._pending[connection]
        pending.text += data
        if not data or len(pending.text) > MAX_BYTES:
            self._drop(connection)
        elif pending.text.endswith(b"\n"):
            text, pending.text = pending.text, b""
            if pending.hello is None:
                self._receive(connection, pending, text)
            else:
                self._check_proof(connection, pending, text)

    def _receive(
        self, connection: socket.socket, pending: _Pending, text: bytes
    ) -> None:
        hello = parse_hello(text)
        if hello is None:  # A stranger, perhaps a port scanner.
            self._drop(connection)
            return
        nonce = hello.get("nonce")
        if self._secret is None:
            self._admit(connection, hello, pending.nonces)
            return
        if nonce is None:
            self._send(connection, {"verdict": OTHER_SECRET})
            self._drop(connection)
            return
        pending.hello, pending.line = hello, text
        pending.nonces = job_secret.make(), nonce
        proof = self._secret.prove(PROCESS_0, pending.nonces, text)
        challenge = {"nonce": pending.nonces[0], "proof": proof}
        self._send(connection, challenge)

    def _check_proof(
        self, connection: socket.socket, pending: _Pending, text: bytes
    ) -> None:
        message = parse_line(text) or {}
        assert self._secret is not None
        assert pending.hello is not None
        proof = self._secret.prove(PROCESS, pending.nonces, pending.line)
        if job_secret.is_same(message.get("proof"), proof):
            self._admit(connection, pending.hello, pending.nonces)
        else:
            self._drop(connection)

    def _admit(
        self,
        connection: socket.socket,
        hello: dict[str, Any],
        nonces: tuple[str, str],
    ) -> None:
        """Assigns a connection to the process that its client claims to be."""
        self._selector.unregister(connection)
        del self._pending[connection]
        self._joined[connection] = nonces
        self._send(connection, {"left_s": min(self._compute_left_s(), MAX)})
        process = hello["process"]
        problem = self._find_problem(process, hello)
        self._hellos.setdefault(process, hello)
        if problem and not self._problem:
            self._problem = problem
            self._max = max(self._max, hello["count"])
            self._end = min(self._end, time.monotonic() + _LINGER_S)

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        nonces = self._joined.get(connection)
        if self._secret is not None and nonces is not None:
            proof = prove_message(self._secret, nonces, message)
            message |= {"proof": proof}
        with contextlib.suppress(OSError):
            connection.sendall(encode_line(message))

    def _find_problem(self, process: int, hello: dict[str, Any]) -> str:
        if "nonce" in hello and self._secret is None:
            return f"{self._name(process)}: {OTHER_SECRET}"
        if hello["count"] != self._count:
            return (
                "All processes must expect the same number of processes. "
                f"Received: {self._count} in process 0, {hello['count']} in "
                f"{self._name(process)}. Pass the same cluster in all of them."
            )
        if not 0 <= process < self._count:
            return (
                "The processes of a job must be numbered from 0. Received: "
                f"process {process} of {self._count}. Number them 0, 1, 2, ..."
            )
        if process in self._hellos:
            return (
                "Process ids must be unique. Received: two processes that "
                f"claim to be {self._name(process)}. Set a different task "
                "index in each, and end processes left from earlier runs."
            )
        if hello["problem"]:
            return f"{self._name(process)}: {clean_text(hello['problem'])}"
        mine, other = self._hellos[0]["facts"], hello["facts"]
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                here, there = shorten(mine.get(name)), shorten(other.get(name))
                return (
                    f"All processes must have the same {clean_text(name)}. "
                    f"Received: {here} in process 0, {clean_text(there)} in "
                    f"{self._name(process)}. Start all processes with the "
                    "same script in the same environment."
                )
        return ""

    def _describe_missing(self, timeout_s: float) -> str:
        missing = [i for i in range(self._count) if i not in self._hellos]
        if not missing:
            return ""
        names = join_few([self._name(i) for i in missing])
        secret = f" They must have its {VARIABLE}." if self._secret else ""
        return (
            f"All {self._count} processes must start within {timeout_s:.0f} s. "
            f"Received: nothing from {names}. Read their logs, and check that "
            f"they were started and can reach process 0.{secret}"
        )

    def _name(self, process: int) -> str:
        if 0 <= process < len(self._names):
            return f"process {process} ({self._names[process]})"
        return f"process {process}"

    def _send_verdict(self, verdict: str) -> None:
        for connection in self._joined:
            connection.settimeout(_GRACE_S)
            self._send(connection, {"verdict": verdict})
        # The clients must close first: otherwise the kernel would keep this
        # port in TIME_WAIT, but JAX needs the port next.
        end = time.monotonic() + _GRACE_S
        for connection in self._joined:
            with contextlib.suppress(OSError):
                connection.settimeout(max(end - time.monotonic(), 0.001))
                connection.recv(1)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]
        connection.close()

    def _close(self) -> None:
        for connection in [*self._pending, *self._joined]:
            connection.close()
