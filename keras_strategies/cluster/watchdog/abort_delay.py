"""A delay of aborts, in which the watchdog can say why they come.

JAX's runtime aborts a process from C++ when a peer is taken for dead, or when
the process that hosts its coordination service is: at once, uncatchably, and
without a cause that users can read. A handler of SIGABRT in Python would need
the interpreter from a thread in an unknown state. So the handler is the C
library's own `sleep`: called with the signal's number, 6, it holds the
aborting thread for six seconds, in which the watchdog finds the cause and ends
the process; if there is none, the abort continues as if nothing had been.
"""

import ctypes
import faulthandler
import os
import pathlib
import signal

POSTPONED_S = int(signal.SIGABRT)
"""For how long an abort is held, in seconds."""


_THREADS = pathlib.Path("/proc/self/task")
_ABORT, _OTHER = (
    1 << (number - 1) for number in (signal.SIGABRT, signal.SIGUSR1)
)


def is_aborting() -> bool:
    """Whether an abort of this process is held; False where that is unknown.

    While a handler runs, its signal is blocked in its thread, as Linux shows.
    A thread that takes no signals at all has others blocked, too.
    """
    for thread in _THREADS.glob("*/status"):
        try:
            lines = thread.read_text(errors="replace").splitlines()
            (mask,) = (
                int(line.split()[1], 16)
                for line in lines
                if line.startswith("SigBlk:")
            )
        except (OSError, ValueError, IndexError):  # It has ended.
            continue
        if mask & _ABORT and not mask & _OTHER:
            return True
    return False


def postpone() -> bool:
    """Holds aborts of this process for a moment; whether that is possible."""
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    # It dumps tracebacks at an abort, and calls the handler before it then.
    is_dumping = faulthandler.is_enabled()
    faulthandler.disable()
    sleep = ctypes.cast(library.sleep, ctypes.c_void_p)
    library.signal(int(signal.SIGABRT), sleep)
    if is_dumping:
        faulthandler.enable()
    return True
