"""The ways in which a job ends: exit codes, causes and exceptions."""

import contextlib
import dataclasses
import enum
import json

from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.cluster.exchange.message_forms import load_form

_MAX_CHARACTERS = 1 << 20


class ExitCode(enum.IntEnum):
    """The exit code of a process that belongs to a job.

    Most values are codes from `sysexits.h`. The value for Ctrl-C is the code
    that shells use. A process that calls `sys.exit(n)` exits with n.
    """

    DONE = 0
    FAILED = 70
    PEER_FAILED = 71
    STALLED = 72
    PREEMPTED = 75
    INTERRUPTED = 130


class Preempted(SystemExit):
    """Raised in all processes after one of them has received SIGTERM.

    All processes raise it before the same step.

    It is a `SystemExit`, so that `finally` blocks run, `except Exception` does
    not catch it, and the process ends with `ExitCode.PREEMPTED`.
    """

    def __init__(self) -> None:
        super().__init__(int(ExitCode.PREEMPTED))


class Stalled(TimeoutError):
    """Raised if other processes of the job did not respond in time."""


def _is_code(value: object) -> bool:
    return type(value) is int and value in set(ExitCode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why a job ends, which is sent to all of its processes.

    Attributes:
      text: A sentence, without a period at its end, that states which process
        is at fault.
      code: The exit code with which the processes that receive it end.
    """

    text: str
    code: int = ExitCode.PEER_FAILED

    def to_json(self) -> str:
        """Encodes the cause as JSON, to send it to other processes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Cause":
        """Parses the cause that another process sent.

        If the text is malformed, returns a cause whose text states this.
        """
        form = {"text": str, "code": _is_code}
        with contextlib.suppress(ValueError):
            sent = load_form(text, form, max_characters=_MAX_CHARACTERS)
            # Cleaned, because the text will be printed on a terminal.
            return cls(text=clean_text(sent["text"]), code=sent["code"])
        return cls(text="another process ended with an unreadable message")
