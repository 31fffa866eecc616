"""The client side of the rendezvous, for all processes except process 0."""

import socket
import time
from typing import Any

from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.greetings import (
    MAX,
    MAX_BYTES,
    OTHER_SECRET,
    PROCESS,
    PROCESS_0,
    clean_text,
    encode_line,
    parse_line,
    prove_message,
)
from keras_strategies.cluster.exchange.job_secret import Secret

_RETRY_S = 0.1
# The verdict of process 0 may still arrive this long after the rendezvous has
# timed out.
_GRACE_S = 2.0
# The minimum time for an attempt to connect that begins just before the
# timeout. It gives the attempt time to fail with an error that is more specific
# than a timeout.
_LAST_TRY_S = 1.0


def join(
    address: tuple[str, int],
    hello: dict[str, Any],
    timeout_s: float,
    secret: Secret | None,
) -> str:
    """Connects to process 0 and waits until it replies whether the job starts.

    Args:
      address: The host and port of process 0.
      hello: The first message, which describes this process.
      timeout_s: The timeout for reaching process 0, in seconds.
      secret: The job's secret, or None if it has none.

    Returns:
      "" if the job can start, else the text of an error.
    """
    end = time.monotonic() + timeout_s + _GRACE_S
    reason = "no answer"
    while (left := end - time.monotonic()) > 0:
        left = max(left, _LAST_TRY_S)
        until = time.monotonic() + left
        try:
            with socket.create_connection(address, timeout=left) as connection:
                verdict = _Guest(connection, secret).ask(hello, until)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if verdict is not None:
                return verdict
            reason = "a connection that another service may have closed"
        time.sleep(min(_RETRY_S, max(left, 0)))
    host, port = address
    return (
        f"Process {hello['process']} must reach process 0 at {host}:{port} "
        f"within {timeout_s:.0f} s. Received: {reason}. Check that process 0 "
        "was started there, and that no firewall blocks the connection."
    )


class _Guest:
    """The client's side of one connection to process 0."""

    def __init__(
        self, connection: socket.socket, secret: Secret | None
    ) -> None:
        self._connection = connection
        self._secret = secret
        self._nonces: tuple[str, str] | None = None

    def ask(self, hello: dict[str, Any], end: float) -> str | None:
        """Sends a description of this process and returns process 0's verdict.

        Returns None if the server at the address is not process 0.

        Args:
          hello: The first message, which describes this process.
          end: The deadline, in seconds on the `time.monotonic` clock.
        """
        nonce = job_secret.make()
        line = encode_line(hello | ({"nonce": nonce} if self._secret else {}))
        self._connection.sendall(line)
        text, num_bytes = b"", 0
        while True:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            data = self._connection.recv(MAX_BYTES)
            text += data
            num_bytes += len(data)
            if not data or num_bytes > MAX_BYTES:
                return None
            *answers, text = text.split(b"\n")
            for answer in answers:
                message = parse_line(answer) or {}
                if self._secret is not None and self._nonces is None:
                    problem = self._prove(self._secret, message, line, nonce)
                    if problem is not None:
                        return problem
                    continue
                if not self._is_proved(message):
                    return None
                if isinstance(message.get("verdict"), str):
                    return clean_text(message["verdict"])
                left_s: Any = message.get("left_s")
                if type(left_s) not in (int, float) or not 0 <= left_s <= MAX:
                    return None
                # Process 0 may have started later than this process, so its
                # remaining time determines the deadline.
                end = time.monotonic() + left_s + 2 * _GRACE_S

    def _prove(
        self, secret: Secret, message: dict[str, Any], hello: bytes, nonce: str
    ) -> str | None:
        """Checks process 0's proof of the secret and sends a proof in return.

        Returns the text of an error if the secrets differ.
        """
        if "left_s" in message or "verdict" in message:
            return OTHER_SECRET
        if not job_secret.is_nonce(message.get("nonce")):
            raise ConnectionError("an answer from a different service")
        nonces = message["nonce"], nonce
        if not job_secret.is_same(
            message.get("proof"), secret.prove(PROCESS_0, nonces, hello)
        ):
            return OTHER_SECRET
        self._nonces = nonces
        proof = secret.prove(PROCESS, nonces, hello)
        self._connection.sendall(encode_line({"proof": proof}))
        return None

    def _is_proved(self, message: dict[str, Any]) -> bool:
        proof = message.pop("proof", None)
        message.pop("job", None)
        if self._secret is None or self._nonces is None:
            return True
        return job_secret.is_same(
            proof, prove_message(self._secret, self._nonces, message)
        )
