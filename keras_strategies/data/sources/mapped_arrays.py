"""Arrays that are memory-mapped from files."""

import mmap

import numpy as np


def is_mapped(array: object) -> bool:
    """Returns whether an array is a shared `np.memmap`, or a view of one.

    Returns False for copy-on-write arrays (mode "c"), which do not share memory
    with their file.
    """
    return _find_memory(array) is not None


def let_go(array: object) -> None:
    """Allows the system to free the memory of a memory-mapped array.

    Otherwise the pages that were read from the file count as the process's
    memory for as long as the array exists. No data is lost: values written to
    the array are in the file. Does nothing for other arrays.
    """
    memory = _find_memory(array)
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def _find_memory(array: object) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # Values that were written to a copy-on-write array are not in the
            # file, so the array's pages must stay in memory.
            memory = getattr(array, "_mmap", None)
            return None if array.mode == "c" else memory
        array = array.base
    return None
