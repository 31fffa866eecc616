"""Exit codes, causes and exceptions of the processes of a job."""

import contextlib
import dataclasses
import enum
import json
from typing import Any

from keras_strategies.cluster.exchange.greetings import readable
from keras_strategies.cluster.exchange.message_forms import fault_of
from keras_strategies.cluster.untrusted import load_json

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
        document: Any = None
        with contextlib.suppress(ValueError):
            document = load_json(text, max_characters=_MAX_CHARACTERS)
        fault = fault_of(document, {"text": str, "code": int})
        if fault is None and document["code"] in set(ExitCode):
            # It goes to a terminal.
            return cls(text=readable(document["text"]), code=document["code"])
        return cls(text="another process ended with an unreadable message")
