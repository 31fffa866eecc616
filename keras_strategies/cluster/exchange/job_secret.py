"""A secret that the processes of a job share, and proofs that one has it.

The proofs are HMAC-SHA256 (RFC 2104) over what was said and a fresh number of
each side, as in challenge and response of RFC 2195. The secret itself is
neither sent nor shown.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping

VARIABLE = "KERAS_STRATEGIES_SECRET"
"""The environment variable that has the secret, the same in all processes."""

MAKE = "openssl rand -hex 32"
"""A command that prints a good one."""

_LEAST, _MOST = 16, 1024
_CONTEXT = "keras_strategies rendezvous 1"
_NONCE_BYTES = 32


class Secret:
    """A secret. Its text is not shown, not even by `repr`."""

    def __init__(self, text: str) -> None:
        # A variable may hold bytes that are no UTF-8, and an error about them
        # would show the secret.
        self._key = text.encode("utf-8", "surrogatepass")

    def proof(self, role: str, nonces: tuple[str, str], content: bytes) -> str:
        """What shows that who says this has the secret.

        Args:
          role: The sender's, so that nobody is answered by their own words.
          nonces: Of process 0, and of the other one.
          said: What is said.

        Returns:
          Hexadecimal digits.
        """
        parts = [_CONTEXT, role, *nonces]
        # A part has no line's end, and comes before what is said.
        message = "\n".join(parts).encode() + b"\n" + content
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Secret(...)"


def is_same(proof: object, expected: str) -> bool:
    """Whether a proof is the one expected; takes as long where it is not."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), expected.encode()
    )


def make() -> str:
    """A new secret's text."""
    return secrets.token_hex(_NONCE_BYTES)


def make_nonce() -> str:
    """A number that was never used before, in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def is_nonce(text: object) -> bool:
    """Whether something may be from `make_nonce`."""
    return (
        isinstance(text, str)
        and len(text) == 2 * _NONCE_BYTES
        and set(text) <= set("0123456789abcdef")
    )


def read_secret(environ: Mapping[str, str]) -> Secret | None:
    """The secret of this process's job; None where it has none.

    Raises:
      ValueError: it is too short to keep anybody out, or far too long. The
        message does not repeat it.
    """
    # A file's last line end is no part of it.
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not _LEAST <= len(text) <= _MOST:
        raise ValueError(
            f"{VARIABLE} is a secret of {_LEAST} to {_MOST} characters, the "
            f"same in all processes of a job. Received: {len(text)} "
            f"characters. Take what `{MAKE}` prints, or unset it."
        )
    return Secret(text)
