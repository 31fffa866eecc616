"""A delay of aborts, in which the watchdog can report their cause.

JAX's runtime aborts a process from C++ when it considers a peer, or the host
of its coordination service, dead: at once, uncatchably, and without a readable
cause. A SIGABRT handler in Python would need the interpreter from a thread in
an unknown state. So the handler is the C library's `sleep`: called with the
signal's number, 6, it blocks the aborting thread for six seconds. In this time
the watchdog finds the cause and ends the process; if there is none, the abort
continues normally.
"""

import ctypes
import faulthandler
import os
import pathlib
import signal

DELAY_S = int(signal.SIGABRT)
"""The delay of an abort, in seconds."""


_THREADS = pathlib.Path("/proc/self/task")
_ABORT, _OTHER = (
    1 << (number - 1) for number in (signal.SIGABRT, signal.SIGUSR1)
)


def is_aborting() -> bool:
    """Returns whether a thread of this process is in a delayed abort.

    While a handler runs, its signal is blocked in its thread, which Linux
    shows in `/proc`; elsewhere the result is False. A thread that blocks
    other signals, too, does not count: it just takes no signals.
    """
    for thread in _THREADS.glob("*/status"):
        try:
            lines = thread.read_text(errors="replace").splitlines()
            (mask,) = (
                int(line.split()[1], 16)
                for line in lines
                if line.startswith("SigBlk:")
            )
        except (OSError, ValueError, IndexError):  # The thread has ended.
            continue
        if mask & _ABORT and not mask & _OTHER:
            return True
    return False


def install() -> bool:
    """Installs the delay of aborts; returns whether the system supports it."""
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    # `faulthandler` dumps tracebacks at an abort and then calls the handler
    # that was there when it was enabled. So ours is installed first.
    is_dumping = faulthandler.is_enabled()
    faulthandler.disable()
    sleep = ctypes.cast(library.sleep, ctypes.c_void_p)
    library.signal(int(signal.SIGABRT), sleep)
    if is_dumping:
        faulthandler.enable()
    return True
