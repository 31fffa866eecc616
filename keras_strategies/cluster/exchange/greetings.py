"""Messages that processes send before JAX starts, as lines of JSON."""

import json
from typing import Any

from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.job_secret import VARIABLE, Secret
from keras_strategies.cluster.exchange.message_forms import (
    has_form,
    load_form,
)

HELLO = "keras_strategies"
HELLO_KINDS = {
    "job": str,
    "process": int,
    "count": int,
    "facts": dict,
    "problem": str,
}
_OURS = {"job": lambda job: job == HELLO}
MAX_BYTES = 65_536
_MAX_TEXT = 4000
# The upper bound of process numbers, of counts of processes, and of times in
# seconds.
MAX = 2**31


# The roles of the senders of proofs. Sender and receiver must use the same
# texts, because both include them in the hash.
PROCESS_0, PROCESS, _SENDS = "process 0", "process", "process 0 tells"
OTHER_SECRET = (
    f"All processes of a job must have the same {VARIABLE}, or it must be "
    "unset in all of them. Received: another one in process 0 than in this "
    "process, or only one of them has it. Set it to the same value in all of "
    f"them. The command `{job_secret.MAKE}` prints a new value. If the values "
    "are equal, check whether another job uses the address of process 0."
)


def prove_message(
    secret: Secret, nonces: tuple[str, str], message: dict[str, Any]
) -> str:
    """Returns the HMAC with which process 0 signs a message."""
    content = json.dumps(message, sort_keys=True).encode()
    return secret.prove(_SENDS, nonces, content)


def encode_line(message: dict[str, Any]) -> bytes:
    """Encodes a message as a line of JSON."""
    return f"{json.dumps({'job': HELLO, **message})}\n".encode()


def parse_hello(text: bytes) -> dict[str, Any] | None:
    """Parses a process's first message; returns None if it is malformed."""
    message = parse_line(text)
    if message is None or message.keys() - {"nonce"} != HELLO_KINDS.keys():
        return None
    form = HELLO_KINDS | {"nonce?": job_secret.is_nonce}
    if not has_form(message, form):
        return None
    if max(abs(message["process"]), abs(message["count"])) > MAX:
        return None
    return message


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parses a line from `encode_line`; returns None if it is malformed."""
    try:
        return load_form(text, _OURS, max_characters=MAX_BYTES)
    except ValueError:
        return None


def clean_text(text: str) -> str:
    """Makes another process's text safe to print.

    Replaces control characters by "?", and truncates the text.
    """
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
