"""The pipe through which a launcher of local processes tells them to end.

Each process has the read end of a pipe. When the launcher ends the job, it
writes a line with the reason. If the pipe is closed without such a line, the
launcher has died.
"""

import os
import stat
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
        # The children of this process must not inherit the pipe.
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)

    def read(self) -> str | None:
        """Returns the reason for the job's end, or None. Never blocks.

        The result is None as long as the launcher runs and has not written a
        line. The launcher writes the whole line at once.
        """
        try:
            data = os.read(self._fd, _MAX_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        line = data.partition(b"\n")[0].decode("utf-8", "replace").strip()
        return line or _GONE


def find_pipe(environ: MutableMapping[str, str]) -> LauncherPipe | None:
    """Returns the launcher's pipe if this process has one, else None.

    Args:
      environ: `os.environ`. The variable with the file descriptor is removed,
        because the children of this process do not inherit the pipe.
    """
    try:
        fd = int(environ.pop(LAUNCHER_FD, ""))
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        return None
    return LauncherPipe(fd) if is_pipe else None
