"""The pipe through which a process reports its progress to its launcher.

`keras-strategies launch --max-restarts` reads these reports to decide whether
to start a failed job again.
"""

import contextlib
import dataclasses
import functools
import os
import re

PROGRESS_PIPE = "KERAS_STRATEGIES_PROGRESS_PIPE"
"""The environment variable with the pipe's file descriptor and inode."""

_LINE = re.compile(rb"(training|directory|step|checkpoint) (\d{1,18})")
_MAX_BYTES = 1 << 16


@dataclasses.dataclass
class Progress:
    """The progress of a job, as reported by its processes.

    Attributes:
      has_trained: Whether the script has run a train step or its own step.
      has_directory: Whether the script has opened a directory of checkpoints.
      step: The last train step that was completed, or None.
      checkpoint: The step of the newest checkpoint, or None.
    """

    has_trained: bool = False
    has_directory: bool = False
    step: int | None = None
    checkpoint: int | None = None

    def note(self, kind: str, number: int) -> None:
        """Records one report."""
        if kind == "training":
            self.has_trained = True
        elif kind == "directory":
            self.has_directory = True
        elif kind == "step":
            self.step = max(number, self.step or 0)
        else:
            self.checkpoint = max(number, self.checkpoint or 0)


class ProgressReader:
    """The launcher's end of the pipe.

    Args:
      progress: The record that reports are added to.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rest = b""
        self._read, self.fd = os.pipe()
        # A process does not wait for a slow launcher; the report is lost.
        for end in (self._read, self.fd):
            os.set_blocking(end, False)

    @property
    def variable(self) -> str:
        """The value of `PROGRESS_PIPE` for the process."""
        return f"{self.fd}:{os.fstat(self.fd).st_ino}"

    def read(self) -> None:
        """Records the reports that have arrived. Never blocks."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._read, _MAX_BYTES)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_MAX_BYTES]
        for line in lines:
            if match := _LINE.fullmatch(line):
                self._progress.note(match[1].decode(), int(match[2]))

    def close(self) -> None:
        """Reads the last reports and closes the pipe."""
        self.read()
        os.close(self._read)


def report(kind: str, step: int = 0) -> None:
    """Reports progress if this process has a launcher that asks for it.

    Args:
      kind: "directory" after a directory of checkpoints was opened, "step"
        after a train step, "checkpoint" when the checkpoint of a step is
        complete or was found.
      step: The number of train steps.
    """
    fd = _find_pipe()
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, f"{kind} {step}\n".encode())


@functools.cache
def report_training() -> None:
    """Reports, once in this process, that the script trains."""
    report("training")


@functools.cache
def _find_pipe() -> int | None:
    """Returns the pipe's file descriptor, or None. Removes the variable.

    The variable may be inherited by a process that has not inherited the pipe;
    there, another file may have the same descriptor, but not the same inode.
    """
    fd, _, inode = os.environ.pop(PROGRESS_PIPE, "").partition(":")
    try:
        if os.fstat(int(fd)).st_ino != int(inode):
            return None
    except (ValueError, OverflowError, OSError):
        return None
    os.set_inheritable(int(fd), False)
    return int(fd)
