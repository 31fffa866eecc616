"""A file with the last step, which outlives a process that is killed."""

import contextlib
import os
import stat
import struct

NAME = ".run_report_step"
"""The name of the file."""

_STEP = struct.Struct("<qq")
_MOST = 2**53


class StepFile:
    """A file to which a process writes its last step.

    A write takes about a microsecond, because the operating system writes the
    bytes to the disk later, also if the process is killed.

    The file only makes a report more exact, so no fault of it raises an error:
    steps that cannot be written are lost. It is not used if it is a link, has a
    second name or belongs to another user, whose data it might overwrite.

    Args:
      directory: The folder of the file.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._handle: int | None = None
        if hasattr(os, "pwrite"):  # Windows does not have it.
            with contextlib.suppress(OSError):
                self._handle = _open(os.path.join(directory, NAME))

    def read(self, start: int) -> int | None:
        """Returns the last step that was written, or None.

        Args:
          start: The number of the start that must have written it. A process
            may be killed before it writes a step.
        """
        data = b""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                data = os.pread(self._handle, _STEP.size, 0)
        if len(data) < _STEP.size:
            return None
        found, step = _STEP.unpack(data)
        return step if found == start and 0 < step < _MOST else None

    def write(self, step: int, start: int = 0) -> None:
        """Writes a step, and the number of the start that computed it."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._handle, _STEP.pack(start, step), 0)

    def close(self) -> None:
        """Closes the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


def _open(path: str) -> int | None:
    """Returns a descriptor of this user's file, or None if it is another's."""
    # Without O_NONBLOCK, a pipe of this name could block.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o600)
    found = os.fstat(handle)
    if (
        stat.S_ISREG(found.st_mode)
        and found.st_nlink == 1
        and found.st_uid == os.geteuid()
    ):
        return handle
    os.close(handle)
    return None
