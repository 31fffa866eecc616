"""A secret that a job's processes share, and proofs that they know it.

A proof is the HMAC-SHA256 (RFC 2104) of the message and of two nonces, one
from each side, as in the challenge-response protocol of RFC 2195. The secret
itself is never sent or printed.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping

VARIABLE = "KERAS_STRATEGIES_SECRET"
"""The environment variable with the secret.

Its value must be the same in all processes.
"""

MAKE = "openssl rand -hex 32"
"""A command that prints a new secret."""

_MIN, _MAX = 16, 1024
_CONTEXT = "keras_strategies rendezvous 1"
_NONCE_BYTES = 32


class Secret:
    """The job's secret. Its text is never printed, not even by `repr`."""

    def __init__(self, text: str) -> None:
        # An environment variable may contain bytes that are not UTF-8. The
        # error that a plain `encode` would raise prints the secret.
        self._key = text.encode("utf-8", "surrogatepass")

    def prove(self, role: str, nonces: tuple[str, str], content: bytes) -> str:
        """Returns an HMAC that proves that the sender knows the secret.

        Args:
          role: The role of the sender. Because proofs of different roles
            differ, a proof cannot be sent back to its sender (a reflection
            attack).
          nonces: The nonces of process 0 and of the other process.
          content: The message that the proof covers.

        Returns:
          The HMAC in hexadecimal digits.
        """
        parts = [_CONTEXT, role, *nonces]
        # Only one list of parts yields this message, because `content` comes
        # last and no other part contains a newline.
        message = "\n".join(parts).encode() + b"\n" + content
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def is_same(proof: object, expected: str) -> bool:
    """Compares a proof with the expected one, in constant time."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), expected.encode()
    )


def make() -> str:
    """Returns a new random secret, or a nonce, in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: object) -> bool:
    """Returns whether `text` has the format of a nonce."""
    return (
        isinstance(text, str)
        and len(text) == 2 * _NONCE_BYTES
        and set(text) <= set("0123456789abcdef")
    )


def read_secret(environ: Mapping[str, str]) -> Secret | None:
    """Reads the job's secret from the environment; None if it is not set.

    Raises:
      ValueError: if the secret is too short to be safe, or far too long. The
        message does not quote it.
    """
    # A trailing newline, as in a secret read from a file, is ignored.
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not _MIN <= len(text) <= _MAX:
        raise ValueError(
            f"{VARIABLE} must be a secret of {_MIN} to {_MAX} characters, "
            f"the same in all processes of a job. Received: {len(text)} "
            f"characters. Use the output of `{MAKE}`, or unset the variable."
        )
    return Secret(text)
