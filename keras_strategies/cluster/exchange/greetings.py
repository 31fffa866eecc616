"""The messages of processes that meet: lines of JSON."""

import json
from typing import Any

from keras_strategies.cluster.exchange import job_secret
from keras_strategies.cluster.exchange.job_secret import VARIABLE, Secret
from keras_strategies.cluster.exchange.message_forms import fault_of, load_form

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
_MAX_SHOWN, _MAX_TEXT = 160, 4000
# Of numbers of processes, and of seconds.
MOST = 2**31


# Who proves something.
PROCESS_0, PROCESS, _SENDS = "process 0", "process", "process 0 tells"
SAME = f"All processes of a job have the same {VARIABLE}, or none has one. "
SET = f"Set it in all of them: `{job_secret.MAKE}` makes one."
NOT_THERE = f"{SAME}Received: one in process 0, and none here. {SET}"
ONLY_HERE = f"{SAME}Received: one here, and none in process 0. {SET}"
ANOTHER = (
    f"{SAME}Received: another one in process 0. {SET} If it is the same, "
    "look for another job at process 0's address."
)


def proof_of(
    secret: Secret, nonces: tuple[str, str], words: dict[str, Any]
) -> str:
    """The proof that process 0 sends this."""
    message = json.dumps(words, sort_keys=True).encode()
    return secret.proof(_SENDS, nonces, message)


def as_line(words: dict[str, Any]) -> bytes:
    """Words as they are sent."""
    return f"{json.dumps({'job': HELLO, **words})}\n".encode()


def parsed(text: bytes) -> dict[str, Any] | None:
    """What a process says; None if it is no process of ours."""
    message = message_in(text)
    if message is None or message.keys() - {"nonce"} != HELLO_KINDS.keys():
        return None
    form = HELLO_KINDS | {"nonce?": job_secret.is_nonce}
    if fault_of(message, form) is not None:
        return None
    if max(abs(message["process"]), abs(message["count"])) > MOST:
        return None
    return message


def message_in(text: bytes) -> dict[str, Any] | None:
    """One of our lines; None for anything else."""
    try:
        return load_form(text, _OURS, max_characters=MAX_BYTES)
    except ValueError:
        return None


def shown(value: object) -> str:
    """What another process says, for a message: short, and printable."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def readable(text: str) -> str:
    """A text of another process, without what a terminal takes for orders."""
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
