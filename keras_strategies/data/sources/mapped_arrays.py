"""Arrays of files, mapped into memory."""

import mmap

import numpy as np


def is_mapped(array: object) -> bool:
    """Whether it is (a view of) a `np.memmap` that shares its file's pages."""
    return _memory(array) is not None


def let_go(array: object) -> None:
    """Leaves what was read of a file to the system to keep in memory or not.

    Otherwise it counts as the process's memory as long as the array lives.
    Nothing is lost: what was written to the array is in the file. Does
    nothing for other arrays.
    """
    memory = _memory(array)
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def _memory(array: object) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # What is written to a copy-on-write array is nowhere else.
            memory = getattr(array, "_mmap", None)
            return None if array.mode == "c" else memory
        array = array.base
    return None
