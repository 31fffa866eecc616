"""The client's part of a meeting: a process that connects to process 0."""

import socket
import time
from typing import Any

from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.greetings import (
    ANOTHER,
    MAX_BYTES,
    MOST,
    ONLY_HERE,
    PROCESS,
    PROCESS_0,
    as_line,
    message_in,
    proof_of,
    readable,
)
from keras_strategies.cluster.exchange.job_secret import Secret

_RETRY_S = 0.1
# What a verdict may take beyond the time for all to come.
_GRACE_S = 2.0
# An attempt that begins at the very end is given this long, so that it says
# more than that time was over.
_LAST_TRY_S = 1.0


def join(
    address: tuple[str, int],
    hello: dict[str, Any],
    timeout_s: float,
    secret: Secret | None,
) -> str:
    """Goes to process 0, and returns what it finds wrong."""
    end = time.monotonic() + timeout_s + _GRACE_S
    reason = "no answer"
    while (left := end - time.monotonic()) > 0:
        left = max(left, _LAST_TRY_S)
        until = time.monotonic() + left
        try:
            with socket.create_connection(address, timeout=left) as connection:
                verdict = _Guest(connection, secret).say(hello, until)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if verdict is not None:
                return verdict
            reason = "it hung up, as another service would"
        time.sleep(min(_RETRY_S, max(left, 0)))
    host, port = address
    return (
        f"Process {hello['process']} must reach process 0 at {host}:{port} "
        f"within {timeout_s:.0f} s. Received: {reason}. Look whether process 0 "
        "was started there, and for a firewall between the machines."
    )


class _Guest:
    """A process that says to process 0 who it is."""

    def __init__(
        self, connection: socket.socket, secret: Secret | None
    ) -> None:
        self._connection = connection
        self._secret = secret
        self._nonces: tuple[str, str] | None = None

    def say(self, hello: dict[str, Any], end: float) -> str | None:
        """Returns what process 0 says; None if that is no process of ours.

        Args:
          hello: Who this process is.
          end: Until when to wait, by `time.monotonic`.
        """
        nonce = job_secret.make_nonce()
        words = as_line(hello | ({"nonce": nonce} if self._secret else {}))
        self._connection.sendall(words)
        text, num_bytes = b"", 0
        while True:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            data = self._connection.recv(MAX_BYTES)
            text += data
            num_bytes += len(data)
            if not data or num_bytes > MAX_BYTES:
                return None
            *lines, text = text.split(b"\n")
            for line in lines:
                message = message_in(line) or {}
                if self._secret is not None and self._nonces is None:
                    problem = self._prove(self._secret, message, words, nonce)
                    if problem is not None:
                        return problem
                    continue
                if not self._is_proved(message):
                    return None
                if isinstance(message.get("verdict"), str):
                    return readable(message["verdict"])
                left_s: Any = message.get("left_s")
                if type(left_s) not in (int, float) or not 0 <= left_s <= MOST:
                    return None
                # It has begun later, and waits for the others as long.
                end = time.monotonic() + left_s + 2 * _GRACE_S

    def _prove(
        self, secret: Secret, message: dict[str, Any], words: bytes, nonce: str
    ) -> str | None:
        """Answers the challenge; what is wrong if it is none of ours."""
        if "left_s" in message or "verdict" in message:
            return ONLY_HERE
        if not job_secret.is_nonce(message.get("nonce")):
            raise ConnectionError("it is another service")
        nonces = message["nonce"], nonce
        if not job_secret.is_same(
            message.get("proof"), secret.proof(PROCESS_0, nonces, words)
        ):
            return ANOTHER
        self._nonces = nonces
        proof = secret.proof(PROCESS, nonces, words)
        self._connection.sendall(as_line({"proof": proof}))
        return None

    def _is_proved(self, message: dict[str, Any]) -> bool:
        proof = message.pop("proof", None)
        message.pop("job", None)
        if self._secret is None or self._nonces is None:
            return True
        return job_secret.is_same(
            proof, proof_of(self._secret, self._nonces, message)
        )
