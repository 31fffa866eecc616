"""Exit codes, causes and exceptions of the processes of a job."""

import contextlib
import dataclasses
import enum
import json

from keras_strategies.cluster.exchange.greetings import readable
from keras_strategies.cluster.exchange.message_forms import load_form

_MAX_CHARACTERS = 1 << 20


class ExitCode(enum.IntEnum):
    """Why a process of a job has ended.

    Those of `sysexits.h` where it has one that fits. `sys.exit(n)` keeps its
    number, and Ctrl-C gives what shells give it.
    """

    DONE = 0
    FAILED = 70
    PEER_FAILED = 71
    STALLED = 72
    PREEMPTED = 75
    INTERRUPTED = 130


class Preempted(SystemExit):
    """SIGTERM came to a process of the job: all stop before one program.

    A `SystemExit`, so that `finally` blocks run, `except Exception` lets it
    through, and the process ends with `ExitCode.PREEMPTED`.
    """

    def __init__(self) -> None:
        super().__init__(int(ExitCode.PREEMPTED))


class Stalled(TimeoutError):
    """Other processes did not do their part in time."""


def _is_code(value: object) -> bool:
    return type(value) is int and value in set(ExitCode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a job ends.

    Attributes:
      text: A sentence without its full stop; names the process.
      code: The exit code of the processes that receive it.
    """

    text: str
    code: int = ExitCode.PEER_FAILED

    def to_json(self) -> str:
        """The cause, as it is sent to other processes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Cause":
        """What `to_json` of another process gave; of anything else, that."""
        form = {"text": str, "code": _is_code}
        with contextlib.suppress(ValueError):
            sent = load_form(text, form, max_characters=_MAX_CHARACTERS)
            # It goes to a terminal.
            return cls(text=readable(sent["text"]), code=sent["code"])
        return cls(text="another process ended with an unreadable message")
