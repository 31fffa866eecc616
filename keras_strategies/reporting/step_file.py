"""A file with the last step, which outlives a process that is killed."""

import mmap
import os
import struct

NAME = ".run_report_step"
"""The name of the file."""

_STEP = struct.Struct("<q")
_MOST = 2**53


class StepFile:
    """A file in memory to which a process writes its last step.

    A write takes less than a microsecond, because the operating system writes
    the memory to the disk, also if the process is killed.

    Args:
      directory: The folder of the file.

    Raises:
      OSError: if the file cannot be opened or mapped.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(os.path.join(directory, NAME), flags, 0o600)
        try:
            os.ftruncate(handle, _STEP.size)
            self._memory = mmap.mmap(handle, _STEP.size)
        finally:
            os.close(handle)

    def read(self) -> int | None:
        """Returns the last step that was written, or None."""
        (step,) = _STEP.unpack_from(self._memory)
        return step if 0 < step < _MOST else None

    def write(self, step: int) -> None:
        """Writes a step."""
        _STEP.pack_into(self._memory, 0, step)

    def close(self) -> None:
        """Closes the file."""
        self._memory.close()
