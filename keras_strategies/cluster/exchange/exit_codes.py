"""Exit codes, causes and exceptions of the processes of a job."""

import contextlib
import dataclasses
import enum
import json

from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.cluster.exchange.message_forms import load_form

_MAX_CHARACTERS = 1 << 20


class ExitCode(enum.IntEnum):
    """The exit code of a process of a job.

    Uses the codes of `sysexits.h` where one fits, and the shells' code for
    Ctrl-C. A process that calls `sys.exit(n)` exits with n.
    """

    DONE = 0
    FAILED = 70
    PEER_FAILED = 71
    STALLED = 72
    PREEMPTED = 75
    INTERRUPTED = 130


class Preempted(SystemExit):
    """A stop of all processes at the same program, after a SIGTERM to one.

    A `SystemExit`, so that `finally` blocks run, `except Exception` does not
    catch it, and the process ends with `ExitCode.PREEMPTED`.
    """

    def __init__(self) -> None:
        super().__init__(int(ExitCode.PREEMPTED))


class Stalled(TimeoutError):
    """A timeout while waiting for other processes of the job."""


def _is_code(value: object) -> bool:
    return type(value) is int and value in set(ExitCode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a job's end.

    Attributes:
      text: A sentence without its period, which names the process.
      code: The exit code of the processes that receive it.
    """

    text: str
    code: int = ExitCode.PEER_FAILED

    def to_json(self) -> str:
        """Returns the cause as it is sent to other processes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Cause":
        """Parses another process's cause; an unreadable one becomes a cause."""
        form = {"text": str, "code": _is_code}
        with contextlib.suppress(ValueError):
            sent = load_form(text, form, max_characters=_MAX_CHARACTERS)
            # The text will be printed on a terminal.
            return cls(text=clean_text(sent["text"]), code=sent["code"])
        return cls(text="another process ended with an unreadable message")
