"""The pipe through which a launcher of local processes tells them to end.

Each process has the read end of a pipe. When the launcher ends the job, it
writes a line with the reason. If the pipe is closed without such a line, the
launcher has died.
"""

import os
import select
import stat
import warnings
from collections.abc import MutableMapping

LAUNCHER_FD = "KERAS_STRATEGIES_LAUNCHER_FD"
"""The environment variable with the file descriptor of the pipe."""

_GONE = "the launcher is gone"
_MAX_BYTES = 4096


class LauncherPipe:
    """The read end of the launcher's pipe.

    Args:
      fd: The file descriptor of the pipe. Nothing else may read from it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""
        self._has_ended = False
        # The children of this process must not inherit the pipe.
        os.set_inheritable(fd, False)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def read(self) -> str | None:
        """Returns the reason for the job's end, or None. Never blocks.

        The result is None as long as the launcher runs and has not written a
        line.
        """
        while not self._has_ended:
            if not self._poll.poll(0):
                return None
            try:
                data = os.read(self._fd, _MAX_BYTES)
            except OSError:
                data = b""
            self._text = (self._text + data)[:_MAX_BYTES]
            line, newline, _ = self._text.partition(b"\n")
            self._has_ended = not data or len(self._text) == _MAX_BYTES
            if newline or self._has_ended:
                return line.decode("utf-8", "replace").strip() or _GONE
        return None


def find_pipe(environ: MutableMapping[str, str]) -> LauncherPipe | None:
    """Returns the launcher's pipe if this process has one, else None.

    Args:
      environ: `os.environ`. The variable with the file descriptor is removed,
        because the children of this process do not inherit the pipe.
    """
    text = environ.pop(LAUNCHER_FD, None)
    if not text:
        return None
    try:
        fd = int(text)
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        is_pipe, fd = False, -1
    if not is_pipe:
        warnings.warn(
            f"{LAUNCHER_FD} must be the file descriptor of a pipe that the "
            f"launcher opened. Received: {text[:40]!r}. The variable is "
            "ignored, so this process receives no messages from a launcher.",
            stacklevel=2,
        )
        return None
    return LauncherPipe(fd)
