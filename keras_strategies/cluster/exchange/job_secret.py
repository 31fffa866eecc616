"""A secret that the processes of a job share, and proofs of knowing it.

The proofs are HMAC-SHA256 (RFC 2104) of the message and a nonce of each side,
as in the challenge and response of RFC 2195. The secret itself is never sent
or printed.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping

VARIABLE = "KERAS_STRATEGIES_SECRET"
"""The environment variable with the secret, the same in all processes."""

MAKE = "openssl rand -hex 32"
"""A command that prints a new secret."""

_LEAST, _MOST = 16, 1024
_CONTEXT = "keras_strategies rendezvous 1"
_NONCE_BYTES = 32


class Secret:
    """A secret, whose text is never printed, not even by `repr`."""

    def __init__(self, text: str) -> None:
        # A variable may contain bytes that are not UTF-8, and the error of a
        # plain `encode` would print the secret.
        self._key = text.encode("utf-8", "surrogatepass")

    def prove(self, role: str, nonces: tuple[str, str], content: bytes) -> str:
        """Returns an HMAC that proves that the sender knows the secret.

        Args:
          role: The sender's role, which prevents reflection attacks.
          nonces: The nonces of process 0 and of the other process.
          content: The message to prove.

        Returns:
          Hexadecimal digits.
        """
        parts = [_CONTEXT, role, *nonces]
        # Unambiguous: no part contains a newline, and `content` comes last.
        message = "\n".join(parts).encode() + b"\n" + content
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Secret(...)"


def is_same(proof: object, expected: str) -> bool:
    """Returns whether a proof is the expected one, in constant time."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), expected.encode()
    )


def make() -> str:
    """Returns the text of a new secret."""
    return secrets.token_hex(_NONCE_BYTES)


def make_nonce() -> str:
    """Returns a number that was never used before, in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: object) -> bool:
    """Returns whether `text` has the form of a nonce."""
    return (
        isinstance(text, str)
        and len(text) == 2 * _NONCE_BYTES
        and set(text) <= set("0123456789abcdef")
    )


def read_secret(environ: Mapping[str, str]) -> Secret | None:
    """Reads the secret of this process's job; None if it is not set.

    Raises:
      ValueError: if it is too short to be safe, or far too long. The message
        does not quote it.
    """
    # A trailing newline, as from a file, is not part of it.
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not _LEAST <= len(text) <= _MOST:
        raise ValueError(
            f"{VARIABLE} must be a secret of {_LEAST} to {_MOST} characters, "
            f"the same in all processes of a job. Received: {len(text)} "
            f"characters. Use the output of `{MAKE}`, or unset it."
        )
    return Secret(text)
