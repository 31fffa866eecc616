"""Arrays of files, mapped into memory."""

import mmap

import numpy as np


def is_mapped(array: object) -> bool:
    """Returns whether an array is (a view of) a shared `np.memmap`.

    Copy-on-write arrays are not: they do not share their file's pages.
    """
    return _find_memory(array) is not None


def let_go(array: object) -> None:
    """Lets the system evict the pages that were read from a mapped file.

    Otherwise they count as the process's memory as long as the array lives.
    Nothing is lost: values written to the array are in the file. Does nothing
    for other arrays.
    """
    memory = _find_memory(array)
    if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def _find_memory(array: object) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # Values written to a copy-on-write array are not in the file, so
            # its pages must stay in memory.
            memory = getattr(array, "_mmap", None)
            return None if array.mode == "c" else memory
        array = array.base
    return None
